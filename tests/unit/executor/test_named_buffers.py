"""Uploads of single buffers."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.unit.executor.nets import infer, make_options


class Offsets(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.zeros(1))
        self.register_buffer("second", torch.zeros(1))
        self.register_buffer("unused", torch.zeros(1))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int32))
        self.weight = nn.Parameter(torch.ones(1))
        self.inner = nn.Module()
        self.inner.register_buffer("third", torch.zeros(1))

    def forward(self, x):
        return x * self.weight + self.first + 10 * self.second + 100 * self.inner.third


def updating(*names):
    return make_options().updatableNamedBuffers(list(names))


def test_named_buffers_are_uploaded_and_others_keep_their_value():
    net = Offsets()
    model = infer(net, updating("first", "inner.third"))
    x = torch.zeros(1)
    assert model(x).item() == 0
    model.first.copy_(torch.ones(1))
    model.second.copy_(torch.ones(1))
    model.inner.third.copy_(torch.ones(1))
    with torch.no_grad():
        net.weight.fill_(5)
    assert model(x).item() == 0
    model.copyNamedBuffersToDevice()
    assert model(x).item() == 101
    assert model(torch.ones(1)).item() == 102
    model.copyWeightsToDevice()
    assert model(torch.ones(1)).item() == 116


def test_without_the_option_the_device_is_unchanged():
    net = Offsets()
    model = infer(net)
    model(torch.zeros(1))
    net.first.fill_(1)
    with pytest.raises(poptorch.Error, match="updatableNamedBuffers"):
        model.copyNamedBuffersToDevice()
    assert model(torch.zeros(1)).item() == 0


def test_a_buffer_that_the_program_does_not_use():
    model = infer(Offsets(), updating("unused", "first"))
    model(torch.zeros(1))
    model.first.fill_(1)
    model.copyNamedBuffersToDevice()
    assert model(torch.zeros(1)).item() == 1


@pytest.mark.parametrize(
    ("name", "text"), [("third", "no buffer 'third'"), ("weight", "no buffer"), ("count", "int32")]
)
def test_a_name_that_cannot_be_uploaded_is_refused_when_the_model_is_compiled(name, text):
    model = infer(Offsets(), updating("first", name))
    with pytest.raises(poptorch.Error, match=text):
        model.compile(torch.zeros(1))
    assert not model.isCompiled()


def test_while_detached_the_upload_is_left_to_attaching():
    model = infer(Offsets(), updating("first"))
    model(torch.zeros(1))
    model.detachFromDevice()
    model.first.fill_(2)
    model.copyNamedBuffersToDevice()
    assert not model.isAttachedToDevice()
    assert model(torch.zeros(1)).item() == 2


def test_training_progress_stays():
    class Trained(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("offset", torch.zeros(1))
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            out = x * self.weight + self.offset
            return out, poptorch.identity_loss(out.sum(), "none")

    net = Trained()
    options = updating("offset")
    optimizer = poptorch.optim.SGD(net.parameters(), lr=1.0)
    model = poptorch.trainingModel(net, options, optimizer)
    assert model(torch.ones(1))[0].item() == 1
    net.offset.fill_(7)
    model.copyNamedBuffersToDevice()
    assert model(torch.ones(1))[0].item() == 7
    assert net.weight.item() == -1
