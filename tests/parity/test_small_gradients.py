"""Gradients of losses near float32's smallest numbers are those of eager PyTorch."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.parity.compare import quiet_options

pytestmark = pytest.mark.usefixtures("used_tile_units")

BATCH = 512
GRADIENTS = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")


class Scaled(nn.Module):
    """Two linear layers, large enough for matrix units, and a scaled loss."""

    def __init__(self, scale):
        super().__init__()
        self.fc1 = nn.Linear(256, 384)
        self.fc2 = nn.Linear(384, 320)
        self.scale = scale

    def forward(self, x, target):
        y = self.fc2(self.fc1(x).relu())
        loss = ((y - target).square().mean()) * self.scale
        return poptorch.identity_loss(loss, "none")


def eager_gradients(model, dtype, inputs):
    twin = Scaled(model.scale).to(dtype)
    twin.load_state_dict(model.state_dict())
    twin(*(x.to(dtype) for x in inputs)).backward()
    return [twin.get_parameter(name).grad.double() for name in GRADIENTS]


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e-30, 1e-32, 1e-34, 1e-36])
def test_gradients_of_a_scaled_loss(scale):
    model = Scaled(scale)
    inputs = torch.randn(BATCH, 256), torch.randn(BATCH, 320)
    expected = eager_gradients(model, torch.float64, inputs)
    eager = eager_gradients(model, torch.float32, inputs)
    options = quiet_options()
    for name in GRADIENTS:
        options.anchorTensor(name, f"Gradient___{name}")
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.0)
    training = poptorch.trainingModel(model, options, optimizer)
    training(*inputs)
    for name, exact, theirs in zip(GRADIENTS, expected, eager, strict=True):
        ours = training.getAnchoredTensor(name).double()
        assert ours.count_nonzero() >= 0.99 * theirs.count_nonzero()
        error, eager_error = ((each - exact).abs().max() for each in (ours, theirs))
        assert error <= 4 * eager_error, name
