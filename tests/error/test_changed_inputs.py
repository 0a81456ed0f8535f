"""Inputs that forward changes in place, and that share memory with others."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch


class Adding(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x, z):
        x += 1
        return x * z * self.scale


class Reading(Adding):
    def forward(self, x, z):
        return x * z * self.scale


LINE = torch.ones(6)


@pytest.mark.parametrize(
    ("x", "z"), [(LINE[:4], LINE[:4]), (LINE[:4], LINE[2:]), (LINE[1:5], LINE[:4])]
)
def test_inputs_with_memory_in_common(x, z):
    model = poptorch.inferenceModel(Adding())
    message = r"input x in place, which shares memory with input z.*Pass x\.clone\(\)"
    with pytest.raises(poptorch.Error, match=message):
        model(x, z)
    assert torch.equal(LINE, torch.ones(6))
    own = x.clone()
    torch.testing.assert_close(model(own, z), Adding()(x.clone(), z))
    torch.testing.assert_close(own, x + 1)
    with pytest.raises(poptorch.Error, match=message):
        model(x, z)
    torch.testing.assert_close(poptorch.inferenceModel(Reading())(x, z), x * z)


def test_a_buffer_of_the_model_as_an_input():
    net = Adding()
    model = poptorch.inferenceModel(net)
    with pytest.raises(poptorch.Error, match="shares memory with 'scale' of the model"):
        model(net.scale, torch.ones(4))


def test_neighbours_in_memory_are_apart():
    line = torch.ones(8)
    model = poptorch.inferenceModel(Adding())
    torch.testing.assert_close(model(line[:4], line[4:]), torch.full((4,), 2.0))
    torch.testing.assert_close(line, torch.tensor([2.0] * 4 + [1.0] * 4))
