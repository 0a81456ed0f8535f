"""The reduce op, run on the device, against float64 PyTorch."""

import math

import pytest
import torch

from tests.ops.one_op import LAYOUTS, OneOp, dtype_name, run_op

EPSILON = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = [
    ((33, 10), [0]),
    ((4099, 10), [0]),
    ((130, 7), [0]),
    ((1, 100), [0]),
    ((300, 256), [0]),
    ((50, 1500), [0]),
    ((7, 3), [1]),
    ((100, 300), [1]),
    ((5, 9000), [1]),
    ((5, 7, 9, 11), [0, 2]),
    ((5, 7, 9, 11), [0, 2, 3]),
    ((5, 7, 9, 11), [1, 3]),
    ((3, 1, 4), [1]),
    ((100_001,), [0]),
    ((1,), [0]),
    ((), []),
]


def reduce(x, function, axes, keepdim=False, dtype=None):
    dtype = dtype or x.dtype
    shape = torch.sum(x.to("meta"), dim=axes, keepdim=keepdim).shape if axes else ()
    return run_op(
        "reduce",
        [x],
        [(dtype, shape)],
        function=function,
        axes=axes,
        keepdim=keepdim,
        dtype=dtype_name(dtype),
    )[0]


def sample(shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", EPSILON, ids=dtype_name)
@pytest.mark.parametrize(("shape", "axes"), SHAPES, ids=str)
def test_against_float64(shape, axes, dtype, layout):
    x = layout(sample(shape, dtype))
    wide = x.double()
    sums = reduce(x, "sum", axes)
    expected = wide.sum(dim=axes)
    bound = wide.abs().sum(dim=axes) * 2e-7 + expected.abs() * EPSILON[dtype]
    assert ((sums.double() - expected).abs() <= bound).all()
    means = reduce(x, "mean", axes, keepdim=True)
    torch.testing.assert_close(
        means.double(), wide.mean(dim=axes, keepdim=True), rtol=EPSILON[dtype], atol=1e-6
    )
    assert torch.equal(reduce(x, "amax", axes), x.amax(dim=axes))
    assert torch.equal(reduce(x, "amin", axes, keepdim=bool(axes)), x.amin(axes, bool(axes)))


@pytest.mark.parametrize("axes", [[0], [1], [0, 1]], ids=str)
def test_sums_are_as_accurate_as_eager(axes):
    x = torch.rand(4096, 301, generator=torch.Generator().manual_seed(3)) + 0.5
    exact = x.double().sum(dim=axes)

    def error(sums):
        return (sums.double() - exact).square().mean().sqrt()

    assert error(reduce(x, "sum", axes)) <= 1.1 * error(x.sum(dim=axes))


@pytest.mark.parametrize("axes", [[0], [1]], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_special_values(axes, value):
    x = sample((21, 37), torch.float32)
    x[3, 36] = x[20, 5] = value
    for function in ("sum", "mean", "amax", "amin"):
        expected = getattr(torch, function)(x, dim=axes)
        torch.testing.assert_close(reduce(x, function, axes), expected, equal_nan=True)


def test_repeated_elements():
    x = torch.arange(6.0).view(1, 6, 1).expand(5, 6, 7)
    assert torch.equal(reduce(x, "sum", [0, 2]), torch.arange(6.0) * 35)
    assert torch.equal(reduce(x, "sum", [1]), torch.full((5, 7), 15.0))


def test_another_element_type():
    x = sample((3, 5000), torch.float16)
    torch.testing.assert_close(
        reduce(x, "sum", [1], dtype=torch.float32), x.float().sum(1), rtol=1e-6, atol=1e-5
    )


@pytest.mark.parametrize("axes", [[0], [1], [0, 1]], ids=str)
def test_the_number_of_threads_changes_nothing(axes):
    x = sample((3000, 300), torch.float32)
    shape = x.sum(dim=axes).shape
    attributes = {"function": "sum", "axes": axes, "keepdim": False, "dtype": "float32"}
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        op = OneOp("reduce", [x], [(x.dtype, shape)], attributes)
        results += [op.run()[0], op.run()[0]]
    torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)
