"""Modules whose code or values cannot be read."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch


def scripted(layer):
    return torch.jit.script(layer)


def recorded(layer):
    return torch.jit.trace(layer, torch.rand(6, 4))


pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated")


@pytest.mark.parametrize("make", [scripted, recorded])
@pytest.mark.parametrize("kind", ["inference", "training"])
def test_torchscript(h, make, kind):
    net = h.Net()
    layer = net.fc
    net.fc = make(layer)
    match = "sub-module 'fc' comes from torch.jit"
    if kind == "training":
        h.refuse_training(net, h.make_options(), poptorch.Error, match)
    else:
        with pytest.raises(poptorch.Error, match=match):
            poptorch.inferenceModel(net, h.make_options())(h.good_batch()[0])
    net.fc = layer
    h.check_training(h.train(net))


def test_the_model_itself_is_torchscript(h):
    model = poptorch.inferenceModel(scripted(nn.Linear(4, 3)), h.make_options())
    with pytest.raises(poptorch.Error, match=r"The model comes from torch\.jit"):
        model(h.good_batch()[0])


def test_parameter_without_values(h):
    with torch.device("meta"):
        layer = nn.Linear(4, 3)
    with pytest.raises(poptorch.Error, match="'weight' is on the device 'meta'") as caught:
        poptorch.inferenceModel(layer, h.make_options())(h.good_batch()[0])
    assert "to_empty" in str(caught.value)


def test_buffer_without_values(h):
    net = h.Net()
    values = net.offset
    net.offset = torch.empty(3, device="meta")
    with pytest.raises(poptorch.Error, match="'offset' is on the device 'meta'"):
        poptorch.inferenceModel(net, h.make_options())(h.good_batch()[0])
    net.offset = values
    h.check_inference(poptorch.inferenceModel(net, h.make_options()))
