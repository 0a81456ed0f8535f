"""Arguments of a function that are alike, so that one recording serves all of them."""

from collections import namedtuple

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.loops.argument_kinds import apart
from popsim_torch.private_torch.trees import tree_flatten

Pair = namedtuple("Pair", "first second")
TENSOR = torch.ones(1)
CALLS = [
    (),
    (TENSOR,),
    (TENSOR, 2, "text", None, 1.5),
    (nn.Parameter(torch.ones(1)),),
    (object(), TENSOR),
    (nn.Linear(1, 1),),
    (torch.Size([1, 2]), TENSOR),
    ([TENSOR],),
    ((TENSOR, TENSOR), TENSOR),
    ({"a": TENSOR},),
    (Pair(TENSOR, 1),),
    ([],),
    ((),),
]


@pytest.mark.parametrize("args", CALLS)
def test_arguments_are_taken_apart_as_torch_does(args):
    for kwargs in ({}, {"more": TENSOR}):
        leaves, structure = apart(args, kwargs)
        expected, expected_structure = tree_flatten((args, kwargs))
        assert [id(one) for one in leaves] == [id(one) for one in expected]
        assert structure == expected_structure


def test_a_tensor_in_a_list_is_another_argument():
    kinds = []

    @poptorch.function
    def add(value):
        kinds.append(type(value))
        tensor = value[0] if isinstance(value, list) else value
        return poptorch.repeat(2, lambda x: x + 1, tensor)

    results = [add(value).item() for value in (TENSOR, [TENSOR], TENSOR * 2, [TENSOR * 3])]
    assert results == [3, 3, 4, 5]
    assert kinds == [torch.Tensor, list]


def test_arguments_that_have_a_history_lose_it_on_their_way():
    @poptorch.function
    def add(value, other):
        return poptorch.repeat(2, lambda x: x + other, value)

    weight = torch.ones(1, requires_grad=True)
    for value, other in (
        (TENSOR, TENSOR),
        (weight, TENSOR),
        (TENSOR, weight * 1),
        (weight, weight),
    ):
        result = add(value, other)
        assert result.item() == 3
        assert not result.requires_grad
    # The returned tensor is a new one, even if no iteration changes it.
    same = poptorch.function(lambda x: poptorch.repeat(1, lambda y: y, x))
    for _ in range(2):
        result = same(TENSOR)
        result.add_(1)
    assert TENSOR.item() == 1
    assert len(add.programs) == 1
