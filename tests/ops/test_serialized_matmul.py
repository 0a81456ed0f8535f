"""The op serialized_matmul, against float64 PyTorch."""

import pytest
import torch

from popsim_torch.errors import Error
from tests.ops.one_op import LAYOUTS, dtype_name, run_op

SLICES = ("rows", "columns", "depth")
EVERY_SLICE = pytest.mark.parametrize("slices", SLICES)
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=dtype_name)
# Rows, depth and columns: below and above the sizes that kernels treat otherwise.
SIZES = {"small": (6, 12, 18), "row": (6, 96, 6), "large": (132, 300, 204)}
BATCHES = {"one": (), "batch_of_one": (1,), "batch": (3,)}


def operands(rows, depth, columns, batch=(), dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(*batch, rows, depth, generator=generator)
    return a.to(dtype), torch.randn(*batch, depth, columns, generator=generator).to(dtype)


def multiply(a, b, slices, factor, *, wide=False, dtype=None, **attributes):
    dtype = dtype or a.dtype
    (out,) = run_op(
        "serialized_matmul",
        [a, b],
        [(dtype, (*a.shape[:-1], b.shape[-1]))],
        slices=slices,
        factor=factor,
        wide_sums=wide,
        dtype=dtype_name(dtype),
        **attributes,
    )
    return out


def assert_product(out, a, b, relative):
    exact = a.double() @ b.double()
    scale = a.double().abs() @ b.double().abs()
    assert ((out.double() - exact).abs() <= relative * scale).all()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@EVERY_SLICE
@TYPES
def test_values(dtype, slices, size, batch, layout):
    a, b = operands(*size, batch, dtype)
    relative = 1e-6 if dtype == torch.float32 else 1e-3
    assert_product(multiply(layout(a), layout(b), slices, 6), a, b, relative)


@pytest.mark.parametrize("factor", [1, 2, 12])
@EVERY_SLICE
def test_factors(slices, factor):
    a, b = operands(24, 36, 60)
    assert_product(multiply(a, b, slices, factor), a, b, 1e-6)


@EVERY_SLICE
def test_operands_of_two_types(slices):
    a, b = operands(24, 36, 60)
    for left, right, dtype in (
        (a.half(), b, torch.float16),
        (a, b.half(), torch.float32),
        (a.half(), b.half(), torch.float32),
        (a, b, torch.float16),
    ):
        relative = 1e-6 if dtype == torch.float32 else 1e-3
        assert_product(multiply(left, right, slices, 4, dtype=dtype), left, right, relative)


@EVERY_SLICE
def test_one_matrix_for_a_whole_batch(slices):
    a, b = operands(24, 36, 60)
    several = b.expand(3, -1, -1)
    left = torch.stack([a, 2 * a, -a])
    assert_product(multiply(left, several, slices, 4), left, several, 1e-6)
    assert_product(multiply(left.half(), several.half(), slices, 4), left, several, 2e-3)


@pytest.mark.parametrize("wide", [False, True])
def test_sums_of_slices_are_rounded_one_by_one_or_once(wide):
    """2048 is followed by 2050 in float16: sums of ones that are added one by one are lost."""
    a = torch.ones(2, 512, dtype=torch.float16)
    b = torch.cat([torch.full((1, 3), 2047.0), torch.ones(511, 3)]).half()
    out = multiply(a, b, "depth", 512, wide=wide, has_reference=wide)
    expected = 2047.0 + 511 if wide else 2048.0
    assert torch.equal(out, torch.full((2, 3), expected).half())


def test_float32_results_of_float16_operands_are_not_rounded():
    a = torch.ones(2, 512, dtype=torch.float16)
    b = torch.cat([torch.full((1, 3), 2047.0), torch.full((511, 3), 1.25)]).half()
    out = multiply(a, b, "depth", 512, dtype=torch.float32)
    assert torch.equal(out, torch.full((2, 3), 2047.0 + 511 * 1.25))


def half_sums(a, b):
    (out,) = run_op("matmul", [a, b], [(a.dtype, (len(a), b.shape[1]))], partials="half")
    return out


def test_half_partials():
    """Slices are products with float16 sums; slices of the sum are added in float16."""
    a, b = operands(24, 512, 36, dtype=torch.float16)
    b += 1
    assert not torch.equal(half_sums(a, b), multiply(a, b, "rows", 2))
    rows = torch.cat([half_sums(part, b) for part in a.split(12)])
    assert torch.equal(multiply(a, b, "rows", 2, partials="half"), rows)
    columns = torch.cat([half_sums(a, part) for part in b.split(18, 1)], 1)
    assert torch.equal(multiply(a, b, "columns", 2, partials="half"), columns)
    depth = sum(map(half_sums, a.split(256, 1), b.split(256)))
    assert torch.equal(multiply(a, b, "depth", 2, partials="half"), depth)


@EVERY_SLICE
def test_infinities_and_nan(slices):
    a, b = operands(8, 8, 8)
    a[0, 0], a[1, 1], b[3, 3] = float("inf"), float("nan"), float("-inf")
    out, expected = multiply(a, b, slices, 4), a @ b
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isinf(), expected.isinf())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor": 5}, "the factor divides 12"),
        ({"factor": 2**62}, "the factor divides 12"),
        ({"b": torch.zeros(7, 3)}, "as many columns as b has rows"),
        ({"b": torch.zeros(1, 6, 3)}, "input 1"),
        ({"a": torch.zeros(6), "b": torch.zeros(6)}, "two or three axes"),
        ({"a": torch.zeros(2, 12, 6), "b": torch.zeros(3, 6, 3)}, "the batch sizes are equal"),
        ({"a": torch.zeros(12, 0), "b": torch.zeros(0, 3)}, "operands are not empty"),
        ({"a": torch.zeros(12, 6).double()}, "is not float64"),
        ({"slices": "batch"}, "'slices' allows 'batch'"),
        ({"partials": "half", "wide_sums": True}, "partials and wide_sums are not given together"),
    ],
)
def test_products_that_are_none(change, message):
    given = {
        "a": torch.zeros(12, 6),
        "b": torch.zeros(6, 3),
        **{"slices": "rows", "factor": 3, "wide_sums": False, "dtype": "float32"},
        **change,
    }
    with pytest.raises(Error, match=message):
        run_op(
            "serialized_matmul",
            [given.pop("a"), given.pop("b")],
            [(torch.float32, (12, 3))],
            **given,
        )
