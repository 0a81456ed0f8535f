"""Arithmetic of an optimizer's step with conditions, which Python takes for 0 and 1."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.parity.compare import quiet_options

FACTORS = {
    "minus": lambda n: -(n % 2 == 0),
    "abs": lambda n: abs(n > 1),
    "power": lambda n: (n > 1) ** 2,
    "as an exponent": lambda n: 2 ** (n % 2 == 0),
    "quotient": lambda n: (n % 2 == 0) // 1,
    "rest": lambda n: (n > 1) % 2,
    "float": lambda n: float(n > 1),
    "compared": lambda n: 1 + ((n > 1) < 1),
    "exclusive or": lambda n: 1 + ((n > 1) ^ True),
}


class Scaled(torch.optim.Optimizer):
    def __init__(self, parameters, factor):
        super().__init__(parameters, {"lr": 0.1})
        self.factor = factor

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                p -= group["lr"] * self.factor(state["step"]) * p.grad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return poptorch.identity_loss(self.scale * x, reduction="sum")


@pytest.mark.parametrize("name", FACTORS)
def test_like_eager(name):
    net, x = Net(), torch.tensor([1.0, 2.0])
    twin = copy.deepcopy(net)
    optimizer = Scaled(twin.parameters(), FACTORS[name])
    model = poptorch.trainingModel(net, quiet_options(), Scaled(net.parameters(), FACTORS[name]))
    for _ in range(4):
        model(x)
        optimizer.zero_grad()
        twin(x).backward()
        optimizer.step()
    model.copyWeightsToHost()
    torch.testing.assert_close(net.scale, twin.scale)
