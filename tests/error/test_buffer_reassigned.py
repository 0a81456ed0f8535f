"""Forward replaces or deletes a parameter or a buffer of the model."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch


def replace_buffer(net, x):
    net.offset = net.offset + 1


def replace_parameter(net, x):
    net.fc.weight = nn.Parameter(net.fc.weight * 2)


def delete_buffer(net, x):
    del net.offset
    return x * 0


def delete_parameter(net, x):
    del net.fc.bias
    return x * 0


@pytest.mark.parametrize(
    "mistake, text",
    [
        (replace_parameter, r"Parameter fc\.weight is reassigned within the model"),
        (replace_buffer, "Buffer offset is reassigned within the model"),
        (delete_buffer, "Buffer offset is removed from the model"),
        (delete_parameter, r"Parameter fc\.bias is removed from the model"),
    ],
    ids=["replace a parameter", "replace a buffer", "delete a buffer", "delete a parameter"],
)
def test_refused(refused, mistake, text):
    refused(mistake, poptorch.Error, text)


def test_the_advice_is_to_copy(refused):
    error = refused(replace_buffer, poptorch.Error, "offset")
    assert "self.offset.copy_(src)" in str(error)


def test_a_buffer_of_a_sub_module(h):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x):
            self.seen = self.seen + 1
            return x

    class Outer(h.Net):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x, y=None):
            return super().forward(self.inner(x), y)

    net = Outer()
    model = poptorch.inferenceModel(net, h.make_options())
    with pytest.raises(poptorch.Error, match=r"Buffer inner\.seen is reassigned"):
        model(h.good_batch()[0])
    assert type(net.inner.seen) is torch.Tensor
    assert net.inner.seen.tolist() == [0.0]
    net.inner.forward = lambda x: x
    h.check_inference(model)


def test_changing_it_in_place_is_fine(h):
    class Counts(h.Net):
        def forward(self, x):
            self.offset.add_(1)
            return x + self.offset.sum()

    net = Counts()
    model = poptorch.inferenceModel(net, h.make_options(2))
    assert model(torch.zeros(2)).tolist() == [4.5, 7.5]
    model.copyWeightsToHost()
    assert net.offset.tolist() == [2.5, 2.5, 2.5]


def test_batch_norm_is_exempt(h):
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(x)

    net = Norm()
    twin = copy.deepcopy(net)
    x = torch.randn(6, 4)
    model = poptorch.inferenceModel(net, h.make_options())
    torch.testing.assert_close(model(x), twin(x).detach(), rtol=1e-5, atol=1e-6)
    model.copyWeightsToHost()
    torch.testing.assert_close(net.norm.running_mean, twin.norm.running_mean)
    torch.testing.assert_close(net.norm.running_var, twin.norm.running_var)
    assert net.norm.num_batches_tracked == 0


def made_as_an_attribute(self, x):
    if getattr(self, "late", None) is None:
        self.late = torch.nn.Linear(4, 3)
    return self.late(x)


def made_in_a_dict(self, x):
    self.fc.extra = torch.nn.ModuleDict({"late": torch.nn.Linear(4, 3)})
    return self.fc.extra["late"](x)


def made_as_a_parameter(self, x):
    self.late = torch.nn.Parameter(torch.zeros(4))
    return self.fc(x + self.late)


@pytest.mark.parametrize("mistake", [made_as_an_attribute, made_in_a_dict, made_as_a_parameter])
def test_layers_that_forward_makes(refused, mistake):
    error = refused(mistake, poptorch.Error, "forward makes parameters: .*late")
    assert "in __init__" in str(error)


def test_a_layer_that_an_eager_call_has_made():
    class Late(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.late = None

        def forward(self, x):
            if self.late is None:
                self.late = torch.nn.Linear(x.shape[-1], 3)
            return self.late(x)

    net, x = Late(), torch.ones(2, 4)
    with pytest.raises(poptorch.Error, match="forward makes parameters"):
        poptorch.inferenceModel(net)(x)
    assert net.late is None
    assert not dict(net.named_parameters())
    expected = net(x).detach()
    torch.testing.assert_close(poptorch.inferenceModel(net)(x), expected)
