"""Tensors that forward makes of Python, NumPy or host values have known values."""

import copy
import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch
from tests.parity.compare import quiet_options
from tests.parity.functions import compare_with_eager, in_both

ARRAY = np.arange(1, 5, dtype=np.float32)
INDICES = np.array([[0, 1], [2, 0]])

FROM_DATA = {
    "as_tensor of an array": lambda m, x: x * torch.as_tensor(ARRAY),
    "tensor of an array": lambda m, x: x * torch.tensor(ARRAY),
    "asarray of an array": lambda m, x: x * torch.asarray(ARRAY),
    "from_numpy": lambda m, x: x * torch.from_numpy(ARRAY),
    "type of its own": lambda m, x: (
        x * torch.as_tensor(ARRAY.astype(np.int64), dtype=torch.float32)
    ),
    "indices": lambda m, x: x[0][torch.as_tensor(INDICES)],
    "of host tensors": lambda m, x: x * torch.tensor(m.host) + torch.as_tensor(m.host),
    "of known tensors": lambda m, x: (
        x * torch.tensor([torch.tensor(2.0), torch.arange(3).sum()])[1]
    ),
    "of the device": lambda m, x: torch.tensor(x) + torch.as_tensor(x) + torch.asarray(x),
    "of the device, other type": lambda m, x: torch.as_tensor(x, dtype=torch.float16).float(),
    "asarray without gradient": lambda m, x: torch.asarray(m.fc(x), requires_grad=False),
    "tensor without gradient": lambda m, x: torch.tensor(m.fc(x)),
    "as_tensor with gradient": lambda m, x: torch.as_tensor(m.fc(x)),
    "asarray, copied": lambda m, x: torch.asarray(x, copy=True).mul_(2) + x,
    "new_tensor": lambda m, x: x.new_tensor(ARRAY) + x.new_tensor(data=[1, 2, 3, 4]),
    "new with sizes": lambda m, x: x.new(2, 4).fill_(3) + x.new(x.size()).zero_(),
    "new with data": lambda m, x: x.new([1, 2, 3, 4]) + x.new(ARRAY),
}


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@in_both(FROM_DATA)
def test_tensor_of_data(function, kind):
    compare_with_eager(function, kind)


def branches(model, x):
    table = torch.tensor([1, 2, 3])
    if table.sum() > 5 and (table == 2).any():
        x = x + 1
    for _ in range(table[1]):
        x = x * 2
    for number in table:
        x = x + number
    while table[0] < 5:
        table += 1
    return x * [5.0, 6.0, 7.0][table[0] - 5]


READS = {
    "branches and loops": branches,
    "item": lambda m, x: x * torch.arange(5).sum().item(),
    "float": lambda m, x: x * float(torch.tensor(0.1, dtype=torch.float64)),
    "int": lambda m, x: x * int(torch.full((2, 2), 7).max()),
    "bool": lambda m, x: x * bool(torch.zeros(3).any()),
    "tolist": lambda m, x: x * sum(torch.arange(4).tolist()),
    "len of nonzero": lambda m, x: x * len(torch.tensor([1, 0, 2]).nonzero()),
    "empty memory": lambda m, x: x * torch.empty(3).fill_(2).sum().item(),
    "equal": lambda m, x: x * torch.equal(torch.arange(3), torch.tensor([0, 1, 2])),
    "allclose": lambda m, x: x * torch.allclose(torch.ones(3), torch.full((3,), 1.0)),
    "in": lambda m, x: x * (2 in torch.tensor([1, 2])),
    "max": lambda m, x: x * max(torch.tensor([3, 1, 2])),
    "format": lambda m, x: x * float(f"{torch.tensor(2.5):.1f}"),
    "of host tensors": lambda m, x: x * (m.host + torch.ones(4)).sum().item(),
    "condition": lambda m, x: torch.cond(torch.tensor(x.shape[0] > 1), torch.sin, torch.cos, (x,)),
    "of a new shape": lambda m, x: x * torch.tensor(x.shape).prod().item(),
    "of ones like x": lambda m, x: x * int(torch.ones_like(x).sum()) + x.new_zeros(3).sum().item(),
    "numpy": lambda m, x: x * torch.arange(4.0).add(1).numpy().sum(),
    "array": lambda m, x: x * torch.from_numpy(np.asarray(torch.arange(4.0)) + 1),
    "cpu": lambda m, x: x * (torch.arange(4.0).cpu() + torch.ones(4).to("cpu")),
    "copies": lambda m, x: x * copy.deepcopy(torch.tensor(2)).item() + copy.copy(torch.ones(4)),
    "range": lambda m, x: sum(x * i for i in range(torch.tensor(3))),
    "sorted": lambda m, x: x * sorted(torch.tensor([3, 1, 2]))[1],
    "unpacked": lambda m, x: (lambda start, end: x[:, start:end])(*torch.tensor([1, 3])),
    "chained comparison": lambda m, x: x + 1 if 1 < torch.tensor(3) < 5 else x,
    "under vmap": lambda m, x: torch.vmap(lambda row: row * int(torch.arange(3).sum()))(x),
    "under grad": lambda m, x: torch.func.grad(lambda y: (y * float(torch.tensor(3.0))).sum())(x),
}


@in_both(READS)
def test_read(function, kind):
    compare_with_eager(function, kind)


ARGUMENTS = {
    "full": lambda m, x: x + torch.full((2, 4), torch.tensor(3.0)),
    "full of a number computed": lambda m, x: x + torch.full((2, 4), -torch.tensor([2.0]).max()),
    "full_like": lambda m, x: x + torch.full_like(x, torch.tensor(3.0)),
    "fill_": lambda m, x: x + torch.zeros(4).fill_(torch.tensor(3.0)),
    "arange": lambda m, x: x + torch.arange(torch.tensor(4)),
    "linspace": lambda m, x: x + torch.linspace(torch.tensor(0.0), torch.tensor(1.0), 4),
    "sizes": lambda m, x: x + torch.ones(torch.tensor(2), torch.tensor(4)),
    "list of sizes": lambda m, x: x + torch.ones([torch.tensor(2), 4]),
    "view": lambda m, x: x.view(torch.tensor(4), -1),
    "slice": lambda m, x: x[:, torch.tensor(1) : torch.tensor(3)],
    "position": lambda m, x: x[:, torch.tensor(1)],
    "narrow": lambda m, x: x.narrow(1, torch.tensor(1), 2),
    "alpha": lambda m, x: torch.add(x, x, alpha=torch.tensor(3.0)),
    "clamp": lambda m, x: x.clamp(min=torch.tensor(0.3)),
    "pad": lambda m, x: F.pad(x, (0, int(torch.tensor([3, 4]).max()) - 2)),
    "split sizes": lambda m, x: torch.split(x, [torch.tensor(1), torch.tensor(3)], 1),
    "tensor_split": lambda m, x: torch.tensor_split(x, torch.tensor([1, 3]), dim=1),
    "tensor_split in parts": lambda m, x: x.tensor_split(torch.tensor(2), 1),
    "split": lambda m, x: torch.split(x, torch.tensor([1, 3]).tolist(), 1),
}


@in_both(ARGUMENTS)
def test_argument(function, kind):
    compare_with_eager(function, kind)


def masked(model, x):
    mask = torch.arange(8).view(2, 4) % 3 == 0
    x = x.clone()
    x[mask] = torch.tensor([1.0, 2.0, 3.0])
    return x


SHAPES = {
    "mask": lambda m, x: m.fc(x)[:, torch.tensor([True, False, True])],
    "mask computed": lambda m, x: x[~(torch.arange(8).view(2, 4) % 3 == 0)],
    "mask and position": lambda m, x: x[torch.tensor([1, 0]), :][:, torch.arange(4) > 1],
    "mask set": masked,
    "nonzero": lambda m, x: x[0][torch.tensor([1, 0, 1, 0]).nonzero()[:, 0]],
    "where": lambda m, x: x[0][torch.where(torch.tensor([1, 0, 1, 0]) > 0)],
    "masked_select": lambda m, x: torch.masked_select(m.fc(x), torch.tensor([True, False, True])),
    "unique": lambda m, x: x[0][torch.unique(torch.tensor([1, 1, 2, 0, 2]))],
    "repeat_interleave": lambda m, x: torch.repeat_interleave(m.fc(x), torch.tensor([1, 2]), 0),
    "bincount": lambda m, x: torch.bincount(torch.tensor([1, 1, 2])) * m.fc(x),
    "one_hot": lambda m, x: F.one_hot(torch.tensor([0, 2])) * m.fc(x),
}


@in_both(SHAPES)
def test_shape(function, kind):
    compare_with_eager(function, kind)


# Parameters and buffers of integers and booleans

CONSTANTS = {
    "item": lambda m, x: x * m.sizes[1].item(),
    "if": lambda m, x: x + 1 if m.sizes.sum() > 3 and m.mask.any() else x,
    "loop": lambda m, x: sum(x * i for i in range(m.sizes[1])),
    "split": lambda m, x: torch.split(x, m.sizes.tolist(), 1),
    "mask": lambda m, x: x[:, m.mask],
    "masked_select": lambda m, x: torch.masked_select(m.fc(x), m.mask[:3]),
    "nonzero": lambda m, x: x[:, (~m.mask).nonzero()[:, 0]],
    "a copy changed": lambda m, x: x * m.sizes.clone().add_(1)[0].item(),
}


@in_both(CONSTANTS)
def test_constant_of_the_model(function, kind):
    compare_with_eager(function, kind)


def test_what_was_read_is_called_a_constant(caplog):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("size", torch.tensor(2))
            self.register_buffer("unused", torch.tensor(2))

        def forward(self, x):
            return x[: self.size]

    with caplog.at_level(logging.WARNING, "poptorch::python"):
        poptorch.inferenceModel(Reads(), quiet_options())(torch.ones(4))
    (record,) = (r for r in caplog.records if "Buffers of integer types" in r.getMessage())
    assert record.getMessage().endswith(": size")


@pytest.mark.parametrize("first", [True, False], ids=["changed first", "read first"])
def test_a_count_is_not_known(first):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("step", torch.tensor(2))

        def forward(self, x):
            if first:
                self.step += 1
            y = x * 2 if self.step > 2 else x
            if not first:
                self.step.view(1).add_(1)
            return y

    model = poptorch.inferenceModel(Counts(), quiet_options())
    with pytest.raises(poptorch.Error, match=r"aten::item .*test_known_values.py:\d+"):
        model(torch.ones(4))


# Changes in place


def changes_views(model, x):
    table = torch.zeros(4)
    row = table[1:]
    row += 2
    table[0] = 5
    factor = table[0].item() + row.sum().item()
    table.mul_(2)
    return x * factor + row.sum().item() + table


def changes_arrays(model, x):
    array = ARRAY.copy()
    tensor = torch.from_numpy(array)
    tensor.add_(1)
    return x * torch.from_numpy(array) + tensor


def changes_host_tensors(model, x):
    table = torch.zeros(2, 4, device="cpu")
    table += x
    table.mul_(2)
    table[0] = 1.0
    return table + x


def reads_in_turns(model, x):
    table, step = torch.zeros(3), torch.ones(3)
    doubled = table * 2 + 1
    part = table[1:]
    found = 0.0
    for position in range(3):
        table += step
        found += table.sum().item() + doubled.sum().item()
        product = table * step
        step[position] += 1
        found += step.sum().item() + part.sum().item()
        table[0] = product[1]
        found += product.prod().item() + table[0].item()
    return x * found


def counts_up(model, x):
    step = torch.tensor([0, 1])
    while step[1] < 50:
        following = step.flip(0)
        following[1] += following[0]
        step.copy_(following)
    return x * step[0].item() + step


def read_before_it_changed(model, x):
    table = torch.zeros(3)
    total = table.sum()
    table[0] = x.sum()
    return x + 1 if total == 0 else x


CHANGES = {
    "read in turns": reads_in_turns,
    "counted up": lambda m, x: counts_up(m, x[:, :2]),
    "values of the device written later": read_before_it_changed,
    "views": changes_views,
    "arrays": changes_arrays,
    "host tensors": changes_host_tensors,
    "out": lambda m, x: torch.add(x, 1, out=torch.empty(2, 4)) * 2,
    "a copy": lambda m, x: torch.as_tensor(m.host).clone().add_(1) + m.host.sum().item() * x,
}


@in_both(CHANGES)
def test_change(function, kind):
    compare_with_eager(function, kind)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.table = torch.arange(4.0)
        self._function = function

    def forward(self, x):
        return self._function(self, x)


def value_of_the_device(model, x):
    table = torch.zeros(3)
    table[0] = x.sum()
    return x * table[1].item()


def changed_host_tensor(model, x):
    table = torch.zeros(4, device="cpu")
    table += x
    return x * table[0].item()


def random_number(model, x):
    return x * torch.rand(()).item()


@pytest.mark.parametrize("function", [value_of_the_device, changed_host_tensor, random_number])
def test_what_depends_on_the_run_is_not_known(function):
    model = poptorch.inferenceModel(Function(function), quiet_options())
    with pytest.raises(
        poptorch.Error, match=r"test_known_values.py:\d+.*tensor.item\(\).*ipu_print_tensor"
    ):
        model(torch.ones(4))


def test_a_view_of_what_was_changed_on_the_device_is_refused():
    def changes_a_row(model, x):
        table = torch.zeros(2, 4, device="cpu")
        table[0].copy_(x)
        return table + x

    model = poptorch.inferenceModel(Function(changes_a_row), quiet_options())
    with pytest.raises(poptorch.Error, match=r"test_known_values.py:\d+ .*shares its memory"):
        model(torch.ones(4))


def test_numbers_of_the_device_make_no_tensor():
    def stacks(model, x):
        return torch.tensor([x.sum(), x.mean()])

    model = poptorch.inferenceModel(Function(stacks), quiet_options())
    with pytest.raises(poptorch.Error, match=r"test_known_values.py:\d+ .*torch.stack"):
        model(torch.ones(4))


def test_host_tensors_and_arrays_keep_their_values():
    array = ARRAY.copy()

    def changes(model, x):
        on_device = torch.as_tensor(model.table)
        on_device += x
        return on_device * torch.tensor(array).add_(1)

    module = Function(changes)
    model = poptorch.inferenceModel(module, quiet_options())
    for factor in (1.0, 2.0):
        x = torch.full((4,), factor)
        assert torch.equal(model(x), (torch.arange(4.0) + x) * torch.arange(2.0, 6.0))
    assert torch.equal(module.table, torch.arange(4.0))
    assert np.array_equal(array, ARRAY)


def test_reading_leaves_nothing_in_the_program():
    def reads(model, x):
        table = torch.arange(1000.0).square()
        return x * (table + 1).sqrt().sum().item()

    model = poptorch.inferenceModel(Function(reads), quiet_options())
    model(torch.ones(4))
    assert model.getTensorNames() == ["input", "Mul:0"]
