"""Inputs that forward changes in place, and that share memory with others."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch


class Adding(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x, z):
        x += 1
        return x * z * self.scale


class Reading(Adding):
    def forward(self, x, z):
        return x * z * self.scale


LINE = torch.ones(6)


@pytest.mark.parametrize(
    ("x", "z"), [(LINE[:4], LINE[:4]), (LINE[:4], LINE[2:]), (LINE[1:5], LINE[:4])]
)
def test_inputs_with_memory_in_common(x, z):
    model = poptorch.inferenceModel(Adding())
    message = r"input x in place, which shares memory with input z.*Pass x\.clone\(\)"
    with pytest.raises(poptorch.Error, match=message):
        model(x, z)
    assert torch.equal(LINE, torch.ones(6))
    own = x.clone()
    torch.testing.assert_close(model(own, z), Adding()(x.clone(), z))
    torch.testing.assert_close(own, x + 1)
    with pytest.raises(poptorch.Error, match=message):
        model(x, z)
    torch.testing.assert_close(poptorch.inferenceModel(Reading())(x, z), x * z)


def test_a_buffer_of_the_model_as_an_input():
    net = Adding()
    model = poptorch.inferenceModel(net)
    with pytest.raises(poptorch.Error, match="shares memory with 'scale' of the model"):
        model(net.scale, torch.ones(4))


def test_neighbours_in_memory_are_apart():
    line = torch.ones(8)
    model = poptorch.inferenceModel(Adding())
    torch.testing.assert_close(model(line[:4], line[4:]), torch.full((4,), 2.0))
    torch.testing.assert_close(line, torch.tensor([2.0] * 4 + [1.0] * 4))


class Doubling(nn.Module):
    def forward(self, x, *, z=None):
        x[..., 0] += 3
        x.mul_(2)
        return x + 1 if z is None else x * z


STRIDED = {
    "every second": lambda y: y.flatten()[::2],
    "column": lambda y: y[:, 1],
    "columns": lambda y: y[..., 1:],
    "transposed": lambda y: y.t(),
    "diagonal": lambda y: y.diagonal(),
    "windows apart": lambda y: y.flatten().unfold(0, 2, 3),
    "whole": lambda y: y,
    "integers": lambda y: y.long().t(),
    "a weight of another model": lambda y: nn.Parameter(y).t(),
}


@pytest.mark.parametrize("view", STRIDED.values(), ids=STRIDED.keys())
def test_changes_of_strided_inputs_reach_the_caller(view):
    one, two = (torch.arange(12.0).reshape(4, 3) for _ in range(2))
    model = poptorch.inferenceModel(Doubling())
    for _ in range(3):
        x, y = view(one), view(two)
        with torch.no_grad():
            expected = Doubling()(x)
        torch.testing.assert_close(model(y), expected, check_dtype=False)
        torch.testing.assert_close(y, x)
        torch.testing.assert_close(two, one)


def test_strided_inputs_with_memory_in_common():
    y = torch.arange(8.0)
    model = poptorch.inferenceModel(Doubling())
    torch.testing.assert_close(model(y[::2], z=y[1::2]), torch.tensor([6.0, 12.0, 40.0, 84.0]))
    torch.testing.assert_close(y, torch.tensor([6.0, 1.0, 4.0, 3.0, 8.0, 5.0, 12.0, 7.0]))
    with pytest.raises(poptorch.Error, match="forward changes input x in place, which shares"):
        model(y[::2], z=y[:4])
    net = Adding()
    net.register_buffer("table", torch.ones(4, 2))
    with pytest.raises(poptorch.Error, match="shares memory with 'table' of the model"):
        poptorch.inferenceModel(net)(net.table[:, 1], torch.ones(4))


class WithTable(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table, self.unread = table, torch.ones(4)

    def forward(self, x):
        x.mul_(2)
        return x + self.table


def test_an_input_that_an_attribute_shows():
    line = torch.ones(6)
    net = WithTable(line[:4])
    model = poptorch.inferenceModel(net)
    torch.testing.assert_close(model(net.unread), torch.full((4,), 3.0))
    with pytest.raises(poptorch.Error, match="shares memory with 'table' of the model"):
        model(line[2:])
    assert torch.equal(line, torch.ones(6))


@pytest.mark.parametrize(
    "x", [torch.ones(1).expand(4), torch.ones(5).unfold(0, 2, 1), torch.ones(2, 1).expand(2, 3)]
)
def test_elements_with_memory_in_common(x):
    before = x.clone()
    model = poptorch.inferenceModel(Doubling())
    with pytest.raises(poptorch.Error, match=r"several elements of which.*Pass x\.clone\(\)"):
        model(x)
    assert torch.equal(x, before)
    torch.testing.assert_close(model(x.clone()), Doubling()(x.clone()))
