"""Slices that do not fit what is written into them, and sizes that memory decides: refused."""

import re

import pytest
import torch
from torch import nn

import popsim_torch as poptorch


def zeros(*shape):
    return torch.zeros(shape, device="cpu")


X = torch.arange(20.0).reshape(4, 5)
ROW, COLUMN = zeros(5), zeros(4)
WRONG = {
    "index": lambda x: x.select_scatter(ROW, 0, 7),
    "index from the end": lambda x: torch.select_scatter(x, ROW, dim=0, index=-5),
    "axis": lambda x: x.select_scatter(ROW, 3, 1),
    "shape": lambda x: x.select_scatter(COLUMN, 0, 1),
    "one element": lambda x: x.select_scatter(ROW[:1], 0, 1),
    "number": lambda x: x[0, 0].select_scatter(ROW[0], 0, 0),
    "dimensions of a slice": lambda x: x.slice_scatter(ROW, 0, 1, 2),
    "size of a slice": lambda x: torch.slice_scatter(x, ROW[None], start=1, end=3),
    "axis of a slice": lambda x: x.slice_scatter(ROW[None], 4, 1, 2),
    "diagonal": lambda x: x.diagonal_scatter(ROW),
}
GOOD = {
    "select": lambda x: x.select_scatter(ROW, 0, -1),
    "select by name": lambda x: torch.select_scatter(input=x, src=COLUMN, dim=1, index=2),
    "slice": lambda x: x.slice_scatter(ROW[None].expand(2, 5), 0, 1, 100, 2),
    "diagonal": lambda x: torch.diagonal_scatter(x, COLUMN, 1),
}


class Written(nn.Module):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, x):
        return self._function(x)


@pytest.mark.parametrize("name", WRONG)
def test_it_is_refused(h, name):
    with pytest.raises((RuntimeError, IndexError)) as eager:
        WRONG[name](X)
    model = poptorch.inferenceModel(Written(WRONG[name]), h.make_options())
    with pytest.raises(eager.type, match=re.escape(str(eager.value))):
        model(X)


@pytest.mark.parametrize("name", GOOD)
def test_what_fits_is_written(h, name):
    result = poptorch.inferenceModel(Written(GOOD[name]), h.make_options())(X)
    assert torch.equal(result, GOOD[name](X))


@pytest.mark.parametrize(
    "resize",
    [
        lambda x: (x * 1).T.resize_(2, 3),
        lambda x: (x * 1)[:, ::2].resize_((2, 2)),
        lambda x: (x * 1).T.resize_as_(x[:2, :2]),
    ],
)
def test_a_tensor_that_is_not_contiguous_is_not_resized(h, resize):
    model = poptorch.inferenceModel(Written(resize), h.make_options())
    with pytest.raises(poptorch.Error, match=r"resize_.*test_written_slices.py:\d+: .*contiguous"):
        model(X)


@pytest.mark.parametrize(
    "resize",
    [
        lambda x: (x * 1).resize_(2, 3),
        lambda x: (x * 1)[1].resize_([2, 2]),
        lambda x: (x * 1).T.resize_(5, 4),
        lambda x: (x * 1).T.contiguous().resize_as_(x),
    ],
)
def test_other_tensors_are_resized(h, resize):
    assert torch.equal(poptorch.inferenceModel(Written(resize), h.make_options())(X), resize(X))
