"""Gradients that are weights themselves: an update must not change them for another one."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch


class Swapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, v):
        ctx.save_for_backward(w, v)
        return w.sum() + v.sum()

    @staticmethod
    def backward(ctx, _gradient):
        w, v = ctx.saved_tensors
        return v, w


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, v):
        ctx.save_for_backward(w, v)
        return w.sum() + v.sum()

    @staticmethod
    def backward(ctx, _gradient):
        return ctx.saved_tensors


class Net(nn.Module):
    def __init__(self, function, first):
        super().__init__()
        self.function = function
        self.w = nn.Parameter(first.clone())
        self.v = nn.Parameter(torch.arange(1.0, 4.0))

    def forward(self):
        return poptorch.identity_loss(self.function(self.w, self.v), reduction="none")


FUNCTIONS = {
    "swapped": (Swapped.apply, torch.ones(3)),
    "same": (Same.apply, torch.ones(3)),
    "cummax of nothing": (lambda w, v: w.cummax(0).values.sum() + v.sum(), torch.zeros(0, 3)),
}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"betas": (0.9, 0.99)}], ids=str)
@pytest.mark.parametrize("case", FUNCTIONS)
def test_weights_train_with_weights_as_gradients(case, settings, accumulation):
    def optimizer(net):
        kind = torch.optim.Adam if "betas" in settings else torch.optim.SGD
        return kind(net.parameters(), lr=0.25, **settings)

    eager, net = Net(*FUNCTIONS[case]), Net(*FUNCTIONS[case])
    options = poptorch.Options()
    options.Training.gradientAccumulation(accumulation)
    model = poptorch.trainingModel(net, options, optimizer(net))
    own = optimizer(eager)
    for _ in range(2):
        model()
        own.zero_grad()
        eager().backward()
        own.step()
    for expected, value in zip(eager.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(value.detach(), expected.detach(), atol=1e-6, rtol=1e-5)
