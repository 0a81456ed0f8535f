"""New tensors that the step of an optimizer fills with values which only a run knows."""

import copy

import pytest
import torch

import popsim_torch as poptorch
from tests.parity.models import Regression


class Stepping(torch.optim.Optimizer):
    """Subtracts what a function makes of weight, gradient and state."""

    def __init__(self, params, change):
        super().__init__(params, {"lr": 0.1})
        self.change = change

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.change(p, p.grad, self.state[p]), alpha=group["lr"])


def counted(state):
    state["n"] = state.get("n", 0) + 1
    return state["n"]


CHANGES = {
    "a condition": lambda p, g, s: torch.full(p.shape, g.mean() > 0) * g,
    "its dtype": lambda p, g, s: torch.full(p.shape, g.mean() > 0, dtype=torch.float32) * g,
    "a choice": lambda p, g, s: torch.where(torch.full(p.shape, g.sum() > 0), g, -p),
    "a bool": lambda p, g, s: torch.full(p.shape, (g.mean() > 0).item()) * g,
    "a keyword": lambda p, g, s: torch.full((), fill_value=g.mean() > 0) * g,
    "a count": lambda p, g, s: torch.full(p.shape, counted(s) > 2) * g + g,
    "a number": lambda p, g, s: torch.full(p.shape, g.mean()),
    "a whole number": lambda p, g, s: torch.full(p.shape, (g > 0).sum()) * g,
    "float64": lambda p, g, s: torch.full(p.shape, g.mean(), dtype=torch.float64).to(p.dtype),
    "full_like": lambda p, g, s: torch.full_like(p, g.mean()),
    "full_like of a condition": lambda p, g, s: torch.full_like(p, g.mean() > 0) * g,
    "full_like of bool": lambda p, g, s: torch.full_like(p, g.sum(), dtype=torch.bool) * g,
    "new_full": lambda p, g, s: p.new_full(p.shape, g.mean() > 0) * g,
    "new_full of bool": lambda p, g, s: p.new_full(p.shape, g.sum(), dtype=torch.bool) * g,
    "a list": lambda p, g, s: torch.tensor([g.mean(), 1.0]).sum() * g,
    "both": lambda p, g, s: g if (g.mean() > 0).item() & (p.mean() > -1).item() else -g,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_tensor_filled_with_a_value_of_the_device(change):
    net = Regression()
    eager = copy.deepcopy(net)
    model = poptorch.trainingModel(net, optimizer=Stepping(net.parameters(), change))
    optimizer = Stepping(eager.parameters(), change)
    for _ in range(4):
        x, y = torch.randn(6, 4), torch.randn(6, 3)
        model(x, y)
        optimizer.zero_grad()
        eager(x, y).backward()
        optimizer.step()
    for own, theirs in zip(net.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(own.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)


def test_a_fill_value_with_a_dimension_is_refused_as_in_eager_pytorch():
    net = Regression()
    change = Stepping(net.parameters(), lambda p, g, s: torch.full(p.shape, g[0] > 0) * g)
    with pytest.raises(poptorch.Error, match=r"'fill_value' .* must be Number"):
        poptorch.trainingModel(net, optimizer=change)(torch.randn(6, 4), torch.randn(6, 3))
