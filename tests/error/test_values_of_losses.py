"""Values that a loss or a covariance cannot take: a run fails where eager PyTorch does."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import popsim_torch as poptorch

GOOD = torch.tensor([[0.25, 0.5, 1.0], [0.0, 0.75, 0.5]])


class Compared(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self._function = function

    def forward(self, x, y):
        out = self._function(x * self.scale, y)
        return out, poptorch.identity_loss(out.sum(), "none")


def with_value(value):
    values = GOOD.clone()
    values[1, 1] = value
    return values


# The function, which tensor gets the bad values, the values, and words of the message.
CASES = {
    "gaussian": (lambda x, y: F.gaussian_nll_loss(x, y, y), 1, [-0.5], "var has negative"),
    "weights": (lambda x, y: torch.cov(x, aweights=y[1]), 1, [-0.5, torch.nan], "negative"),
    "counts": (lambda x, y: torch.cov(x, fweights=(4 * y[1]).long()), 1, [-1.0], "negative"),
    "no weights": (lambda x, y: torch.cov(x, aweights=y[1] * 0), 1, [1.0], "sum to zero"),
}


@pytest.mark.parametrize("kind", ["inference", "training"])
@pytest.mark.parametrize("name", CASES)
def test_a_run_fails(h, name, kind):
    function, place, values, message = CASES[name]
    module = Compared(function)
    twin = copy.deepcopy(module)
    if kind == "training":
        model = h.train(module, lr=0.0)
    else:
        model = poptorch.inferenceModel(module, h.make_options())
    for value in values:
        inputs = [GOOD, GOOD]
        inputs[place] = with_value(value)
        with pytest.raises((RuntimeError, ValueError), match=message):
            twin(*inputs)
        line = r"while running '.*test_values_of_losses.py:\d+\): "
        with pytest.raises(poptorch.Error, match=rf"{line}.*{message}"):
            model(*inputs)
        if name != "no weights":
            result, expected = model(GOOD, GOOD)[0], twin(GOOD, GOOD)[0].detach()
            torch.testing.assert_close(result.reshape(expected.shape), expected)


REFUSED = {
    "reduction": (lambda x, y: F.gaussian_nll_loss(x, y, y, reduction="abc"), ValueError, "abc is"),
    "number": (lambda x, y: F.gaussian_nll_loss(x, y, -1.0), ValueError, "var has negative"),
    "size": (lambda x, y: F.gaussian_nll_loss(x, y, y[:, :2]), ValueError, "of incorrect size"),
    "counts of floats": (lambda x, y: torch.cov(x, fweights=y[0]), RuntimeError, "integral dtype"),
    "weights of integers": (
        lambda x, y: torch.cov(x, aweights=y[0].long()),
        RuntimeError,
        "floating point dtype",
    ),
    "weights of a matrix": (lambda x, y: torch.cov(x, aweights=y), RuntimeError, "2 dimensions"),
    "weights of others": (lambda x, y: torch.cov(x, aweights=y[0, :2]), RuntimeError, "2 != 3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_is_refused_as_in_eager_pytorch(h, name):
    function, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        function(GOOD, GOOD)
    with pytest.raises(kind, match=message):
        poptorch.inferenceModel(Compared(function), h.make_options())(GOOD, GOOD)


def test_a_variance_for_each_sample(h):
    module = Compared(lambda x, y: F.gaussian_nll_loss(x, y, y.sum(1), reduction="none"))
    model = poptorch.inferenceModel(module, h.make_options())
    torch.testing.assert_close(model(GOOD, GOOD)[0], module(GOOD, GOOD)[0].detach())
