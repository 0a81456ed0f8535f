"""Operators that only check values: a run that they refuse fails, and the next run is correct."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

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
    "probabilities": (
        lambda x: F.binary_cross_entropy(1 / x, GOOD.clamp(max=1.0)),
        "all elements of input should be between 0 and 1",
    ),
    "probabilities that are negative": (
        lambda x: F.binary_cross_entropy((x - 0.5).clamp(max=1.0), GOOD / 4, reduction="none"),
        "all elements of input should be between 0 and 1",
    ),
    "probabilities that are NaN": (
        lambda x: F.binary_cross_entropy(1 - 0 * (1 / x), GOOD / 4, reduction="sum"),
        "all elements of input should be between 0 and 1",
    ),
    "labels of two classes": (
        lambda x: F.binary_cross_entropy(x.sigmoid(), 1 / x.detach()),
        "all elements of target should be between 0 and 1",
    ),
    "variances": (
        lambda x: F.gaussian_nll_loss(x, 2 * x, x - 0.5),
        "var has negative entr",
    ),
    "shares": (
        lambda x: torch.quantile(x, 1 / x.detach().reshape(-1)),
        r"q must be in the range \[0, 1\]",
    ),
    "negative shares": (
        lambda x: x.nanquantile(q=(x.detach()[0] - 0.5).clamp(max=1.0)),
        r"q must be in the range \[0, 1\]",
    ),
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


@pytest.mark.parametrize("name", CHECKS)
def test_in_a_loop(h, name):
    function, message = CHECKS[name]

    def in_loop(x):
        return poptorch.for_loop(2, lambda y: y * 1.0 + 0 * function(y).sum(), [x])[0]

    model = poptorch.inferenceModel(Checks(in_loop), h.make_options())
    for _ in range(2):
        with pytest.raises(poptorch.Error, match=rf"test_failed_checks.py:\d+\): .*{message}"):
            model(BAD)
        torch.testing.assert_close(model(GOOD)[0], GOOD)


def test_a_bad_micro_batch_updates_nothing(h):
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1)

        def forward(self, x, y):
            return F.binary_cross_entropy(self.fc(x).sigmoid(), y)

    module = Classifier()
    model = h.train(module, h.make_options(1, 3), lr=0.5)
    x, y = torch.randn(3, 2), torch.tensor([[1.0], [0.0], [1.0]])
    before = copy.deepcopy(module.state_dict())
    for bad in (0, 2):
        wrong = y.clone()
        wrong[bad] = -1.0
        with pytest.raises(poptorch.Error, match="elements of target"):
            model(x, wrong)
        torch.testing.assert_close(dict(module.state_dict()), dict(before), rtol=0, atol=0)
    model(x, y)
    twin = Classifier()
    twin.load_state_dict(before)
    twin(x, y).backward()
    expected = twin.fc.weight - 0.5 * twin.fc.weight.grad
    torch.testing.assert_close(module.fc.weight, expected, rtol=1e-5, atol=1e-6)


def test_probabilities_of_no_samples(h):
    module = Checks(lambda x: F.binary_cross_entropy(x[:0], x[:0], reduction="sum"))
    assert poptorch.inferenceModel(module, h.make_options())(GOOD)[0].item() == 0.0


def test_saturated_probabilities_pass(h):
    module = Checks(lambda x: F.binary_cross_entropy(x.sigmoid(), (x > 0).float()))
    x = torch.cat([torch.linspace(-200.0, 200.0, 100_001), torch.tensor([torch.inf, -torch.inf])])
    model = poptorch.inferenceModel(module, h.make_options())
    torch.testing.assert_close(model(x)[0], module(x)[0].detach(), rtol=1e-5, atol=1e-6)
