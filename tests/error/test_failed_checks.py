"""Operators that only check values: a run that they refuse fails, and the next run is correct."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch

GOOD = torch.tensor([[4.0, 1.0], [1.0, 3.0]])
BAD = torch.zeros(2, 2)


def asserted(x):
    torch._assert_async(x.sum() > 0, "the sum must be positive")
    return x * 2


def asserted_after_a_change(x):
    x = x.clone()
    x += 1
    torch._assert_async((x > 1).any())
    return x


CHECKS = {
    "assert": (asserted, "the sum must be positive"),
    "assert after a change": (asserted_after_a_change, "nonzero value"),
    "cholesky": (torch.linalg.cholesky, "not positive-definite"),
    "inv": (torch.linalg.inv, "singular"),
    "solve": (lambda x: torch.linalg.solve(x, GOOD), "singular"),
}


class Checks(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self._function = function

    def forward(self, x):
        out = self._function(x * self.scale)
        return out, poptorch.identity_loss(out.sum(), "none")


@pytest.mark.parametrize("kind", ["inference", "training"])
@pytest.mark.parametrize("name", CHECKS)
def test_in_a_run(h, name, kind):
    function, message = CHECKS[name]
    module = Checks(function)
    twin = copy.deepcopy(module)
    if kind == "training":
        model = h.train(module, lr=0.0)
    else:
        model = poptorch.inferenceModel(module, h.make_options())
    for _ in range(2):
        match = rf"while running '.*test_failed_checks.py:\d+\): .*{message}"
        with pytest.raises(poptorch.Error, match=match):
            model(BAD)
        torch.testing.assert_close(model(GOOD)[0], twin(GOOD)[0].detach(), rtol=1e-5, atol=1e-6)


def test_a_check_of_what_nobody_else_uses(h):
    def function(x):
        torch._assert_async(x.square().sum() < 100, "too large")
        return torch.ones(2)

    model = poptorch.inferenceModel(Checks(function), h.make_options())
    assert model(GOOD)[0].tolist() == [1.0, 1.0]
    with pytest.raises(poptorch.Error, match="too large"):
        model(100 * GOOD)
