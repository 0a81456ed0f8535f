"""Tensors of subclasses that consist of other tensors: they have no data of their own."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch


class Pair(torch.Tensor):
    """A tensor that adds up two tensors whenever it is used."""

    @staticmethod
    def __new__(cls, first, second):
        return torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype)

    def __init__(self, first, second):
        self.parts = (first, second)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(*args[0].parts)
        whole = [sum(one.parts) if isinstance(one, cls) else one for one in args]
        return func(*whole, **(kwargs or {}))


class Named(torch.Tensor):
    """A tensor of a subclass that has memory like any other tensor."""


class Adds(nn.Module):
    def __init__(self, buffer=None):
        super().__init__()
        self.constant = 0.0
        self.register_buffer("buffer", buffer)

    def forward(self, x):
        return x + self.constant + (0.0 if self.buffer is None else self.buffer)


@pytest.fixture
def pair():
    return Pair(torch.ones(2), torch.ones(2))


def sum_of(elements):
    with poptorch.InfeedQueue(elements) as queue:
        add = poptorch.function(lambda: poptorch.repeat(2, torch.add, torch.zeros(2), queue))
        return add()


def test_elements(pair):
    with pytest.raises(poptorch.Error, match="InfeedQueue: the element is a Pair, which consists"):
        sum_of([pair, pair])
    with pytest.raises(poptorch.Error, match="InfeedQueue: element 1 is a Pair, which consists"):
        sum_of([torch.ones(2), pair])


def test_arguments(pair):
    model = poptorch.inferenceModel(Adds())
    with pytest.raises(poptorch.Error, match="Input x is a Pair, which consists of other"):
        model(pair)
    model(torch.ones(2))
    with pytest.raises(poptorch.Error, match=r"expected .*Tensor.* got .*Pair"):
        model(pair)
    add = poptorch.function(lambda x: poptorch.repeat(2, lambda y: y + x, x))
    for _ in range(2):
        with pytest.raises(poptorch.Error, match="argument 0 is a Pair, which consists of other"):
            add(pair)
        add(torch.ones(2))


def test_buffers_and_constants(pair):
    with pytest.raises(poptorch.Error, match="'buffer' is a Pair, which consists of other"):
        poptorch.inferenceModel(Adds(pair))(torch.ones(2))
    model = Adds()

    model.constant = pair
    with pytest.raises(poptorch.Error, match=r"test_wrapper_tensors.py:\d+ uses a Pair, which"):
        poptorch.inferenceModel(model)(torch.ones(2))


def test_other_subclasses_are_tensors():
    named = torch.ones(2).as_subclass(Named)
    assert sum_of([named, named]).tolist() == [2, 2]
    model = Adds(named.clone())
    model.constant = named
    assert poptorch.inferenceModel(model)(named).tolist() == [3, 3]
