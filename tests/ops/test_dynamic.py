"""The ops dynamic_slice and dynamic_update, against PyTorch's indexing."""

import pytest
import torch

from popsim_torch.errors import Error
from tests.ops.one_op import LAYOUTS, dtype_name, run_op

DTYPES = [
    *(torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32),
]
SHAPE = (5, 12, 33)
# Before the beginning, at it, inside, so that the end is reached, after it, far away.
STARTS = [-1, 0, 3, SHAPE[1] - 1, SHAPE[1] + 4, 10**12, -(10**12)]
AXES = pytest.mark.parametrize("axis", [0, 1, 2])
EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def sample(shape, dtype=torch.float32):
    return torch.randint(0, 99, shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def positions(start, count, step, length):
    return torch.tensor([(start + i * step) % length for i in range(count)])


def read(x, start, axis, count, step=1):
    shape = list(x.shape)
    shape[axis] = count
    (out,) = run_op(
        "dynamic_slice", [x, start], [(x.dtype, shape)], axis=axis, count=count, step=step
    )
    return out


def replace(x, part, start, axis, step=1):
    (out,) = run_op("dynamic_update", [x, part, start], [(x.dtype, x.shape)], axis=axis, step=step)
    return out


@EVERY_LAYOUT
@AXES
@pytest.mark.parametrize("start", STARTS)
def test_slice(start, axis, layout):
    x = sample(SHAPE)
    out = read(layout(x), torch.tensor(start), axis, 3)
    assert torch.equal(out, x.index_select(axis, positions(start, 3, 1, SHAPE[axis])))


@EVERY_LAYOUT
@AXES
@pytest.mark.parametrize("start", STARTS)
def test_update(start, axis, layout):
    x, part = sample(SHAPE), -sample(SHAPE).narrow(axis, 0, 3)
    out = replace(layout(x), layout(part), torch.tensor(start), axis)
    where = positions(start, 3, 1, SHAPE[axis])
    assert torch.equal(out, x.index_copy(axis, where, part))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_element_types(dtype):
    x = sample(SHAPE, dtype)
    where = positions(10, 4, 1, 12)
    part = read(x, torch.tensor([10]), 1, 4)
    assert torch.equal(part, x[:, where])
    zeros = torch.zeros_like(x)
    expected = zeros.clone()
    expected[:, where] = part
    assert torch.equal(replace(zeros, part, torch.tensor([10]), 1), expected)


@pytest.mark.parametrize("start", [0, 4, 7, 11])
@pytest.mark.parametrize(("count", "step"), [(3, 4), (2, 11), (12, 1), (1, 50)])
def test_steps(count, step, start):
    x = sample(SHAPE)
    where = positions(start, count, step, 12)
    part = read(x, torch.tensor(start), 1, count, step)
    assert torch.equal(part, x[:, where])
    assert torch.equal(replace(x, 1 + part, torch.tensor(start), 1, step)[:, where], 1 + part)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=dtype_name)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_forms_of_the_start(shape, dtype):
    x = sample(SHAPE)
    assert torch.equal(read(x, torch.full(shape, 7, dtype=dtype), 2, 5), x[..., 7:12])


def test_repeated_elements():
    x = sample((1, 12, 1)).expand(SHAPE)
    assert torch.equal(read(x, torch.tensor(9), 1, 6), x.roll(3, 1)[:, :6])


X, START = torch.zeros(4, 6), torch.tensor(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axis": 2}, "the tensor has an axis 2"),
        ({"count": 7}, "an axis of 6 has 7 positions"),
        ({"count": 4, "step": 2}, "an axis of 6 has 4 positions, each 2 after"),
        ({"count": 2**62, "step": 2**62}, "an axis of 6 has"),
        ({"start": torch.zeros(2, dtype=torch.int64)}, "the start has one value"),
        ({"start": torch.tensor(0.0)}, "is not float32"),
        ({"x": torch.zeros(4, 0)}, "an axis of 0 has"),
    ],
)
def test_slices_that_are_none(change, message):
    given = {"x": X, "start": START, "axis": 1, "count": 3, **change}
    with pytest.raises(Error, match=message):
        run_op(
            "dynamic_slice",
            [given.pop("x"), given.pop("start")],
            [(torch.float32, (4, 3))],
            **given,
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"part": torch.zeros(4, 7)}, "an axis of 6 has 7 positions"),
        ({"part": torch.zeros(3, 2)}, "input 1"),
        ({"part": torch.zeros(4, 2, 1)}, "input 1"),
        ({"part": torch.zeros(4, 0)}, "an axis of 6 has 0"),
        ({"part": torch.zeros(4, 2).half()}, "have the same dtype"),
        ({"start": torch.zeros(0, dtype=torch.int64)}, "the start has one value"),
        ({"axis": 2}, "the tensor has an axis 2"),
    ],
)
def test_updates_that_are_none(change, message):
    given = {"part": torch.zeros(4, 2), "start": START, "axis": 1, **change}
    with pytest.raises(Error, match=message):
        run_op(
            "dynamic_update",
            [X, given.pop("part"), given.pop("start")],
            [(torch.float32, (4, 6))],
            **given,
        )
