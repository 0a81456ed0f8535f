"""Norms of numbers far from 0: what enableStableNorm asks for is what is always done."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options

NORMS = {
    "batch": lambda: nn.BatchNorm2d(6, eps=1e-12),
    "group": lambda: nn.GroupNorm(2, 6, eps=1e-12),
    "instance": lambda: nn.InstanceNorm2d(6, eps=1e-12),
    "layer": lambda: nn.LayerNorm([6, 9, 7], eps=1e-12),
}


class WithLoss(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        y = self.norm(x)
        return y, poptorch.identity_loss(y.square(), "sum")


def normalised(name, x, on):
    options = make_options()
    options.enableStableNorm(on)
    module = WithLoss(NORMS[name]())
    module.anchor = nn.Parameter(torch.zeros(()))
    optimizer = poptorch.optim.SGD(module.parameters(), lr=0.0)
    if name == "instance":
        return poptorch.inferenceModel(module, options)(x)[0]
    return poptorch.trainingModel(module, options, optimizer)(x)[0]


@pytest.mark.parametrize("name", NORMS)
def test_variances_far_from_zero_are_accurate(name):
    torch.manual_seed(0)
    # mean(x^2) - mean(x)^2 would have no right digit.
    x = 10_000 + torch.randn(4, 6, 9, 7)
    ours = normalised(name, x, True)
    exact = NORMS[name]().double()(x.double()).detach()
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=2e-3)
    assert torch.equal(ours, normalised(name, x, False))
