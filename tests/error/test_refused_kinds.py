"""Calls that eager PyTorch refuses for the kinds of numbers of their operands."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import popsim_torch as poptorch

MASK, IDS, X = torch.tensor([True, False]), torch.tensor([1, 2]), torch.ones(2)
WRONG = {
    "mask - number": lambda mask, ids, x: mask - 0.5,
    "number - mask": lambda mask, ids, x: 0.5 - mask,
    "mask - mask": lambda mask, ids, x: mask - mask,
    "mask - x": lambda mask, ids, x: torch.sub(mask, x),
    "x - mask": lambda mask, ids, x: x - mask,
    "x -= mask": lambda mask, ids, x: operator.isub(x.clone(), mask),
    "x.sub_(mask)": lambda mask, ids, x: x.clone().sub_(mask),
    "abs": lambda mask, ids, x: mask.abs(),
    "ceil": lambda mask, ids, x: torch.ceil(mask),
    "round": lambda mask, ids, x: mask.round(),
    "relu": lambda mask, ids, x: F.relu(mask),
    "addcmul": lambda mask, ids, x: torch.addcmul(mask, mask, mask),
    "max_pool1d": lambda mask, ids, x: F.max_pool1d(ids.view(1, 1, 2), 2),
    "interpolate": lambda mask, ids, x: F.interpolate(ids.view(1, 1, 2), 4),
    "ids *= number": lambda mask, ids, x: operator.imul(ids.clone(), 0.5),
    "ids.mul_(x)": lambda mask, ids, x: ids.clone().mul_(x),
    "ids.addcmul_": lambda mask, ids, x: ids.clone().addcmul_(x, x),
    "mask.mul_(ids)": lambda mask, ids, x: mask.clone().mul_(ids),
}
RIGHT = {
    "x - number": lambda mask, ids, x: x - 0.5,
    "x - ids": lambda mask, ids, x: x - ids,
    "x * mask": lambda mask, ids, x: x.clone().mul_(mask),
    "ids.mul_(ids)": lambda mask, ids, x: ids.clone().mul_(ids),
    "ids.mul_(mask)": lambda mask, ids, x: ids.clone().mul_(mask),
    "mask.mul_(mask)": lambda mask, ids, x: mask.clone().mul_(mask),
    "x.addcmul_": lambda mask, ids, x: x.clone().addcmul_(x, x, value=2),
    "abs": lambda mask, ids, x: ids.neg().abs(),
    "histc": lambda mask, ids, x: torch.histc(x, 3),
    "interpolate": lambda mask, ids, x: F.interpolate(ids.byte().view(1, 1, 1, 2), (1, 4)),
}


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, mask, ids, x):
        return self.function(mask, ids, x)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_kinds_have_the_error_of_eager_pytorch(case):
    function = WRONG[case]
    with pytest.raises(RuntimeError) as expected:
        function(MASK, IDS, X)
    with pytest.raises(RuntimeError) as caught:
        poptorch.inferenceModel(Net(function))(MASK, IDS, X)
    assert str(caught.value) == str(expected.value)
    assert type(caught.value) is type(expected.value)


@pytest.mark.parametrize("case", RIGHT)
def test_right_kinds_are_computed(case):
    function = RIGHT[case]
    expected = function(MASK, IDS, X)
    result = poptorch.inferenceModel(Net(function))(MASK, IDS, X)
    assert torch.equal(result, expected.to(result.dtype))
