"""Matrix products that are large enough for a processor's matrix units.

Those compute in parts of bfloat16. What has to hold on any processor, and with software for the
units: errors as small as those of eager PyTorch's float32, or of one sum where oneDNN computes, and
the right infinities and NaN.
"""

import pytest
import torch

from popsim_torch import _native
from tests.ops.accuracy import assert_as_exact_as_one_sum
from tests.ops.one_op import run_op, transposed

pytestmark = pytest.mark.usefixtures("tile_units")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Rounding once to the type of the result, as a share of the largest value.
ROUNDING = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-8}
# Rows, depth, columns: whole blocks, edges on all axes, several stretches of the depth, several
# chunks of the smaller operand, few rows.
SIZES = [(128, 512, 512), (257, 519, 271), (130, 2085, 163), (739, 264, 701), (65, 1001, 1023)]


def product(a, b, *rest, **attributes):
    shape = torch.matmul(a.to("meta"), b.to("meta")).shape
    return run_op("matmul", [a, b, *rest], [(a.dtype, shape)], **attributes)[0]


def assert_accurate(actual, expected, a, b):
    """The units' error is of the size of eager float32's, which adds in another order, plus
    rounding."""
    assert actual.dtype == a.dtype
    if not _native.has_tile_units():
        counts = a.shape[-1] + 1  # and a bias
        assert_as_exact_as_one_sum(actual, expected, counts, ROUNDING[a.dtype])
        return
    eager = (a.float() @ b.float()).double() - a.double() @ b.double()
    rounding = ROUNDING[a.dtype] * expected.abs().max()
    error = (actual.double() - expected).abs().max()
    assert error <= 2.5 * eager.abs().max() + rounding * 1.01


@pytest.mark.usefixtures("used_tile_units")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("of_a", [torch.Tensor.contiguous, transposed], ids=["a", "a.t"])
@pytest.mark.parametrize("of_b", [torch.Tensor.contiguous, transposed], ids=["b", "b.t"])
def test_accuracy(of_a, of_b, size, dtype):
    m, k, n = size
    a, b = of_a(torch.randn(m, k).to(dtype)), of_b(torch.randn(k, n).to(dtype))
    assert_accurate(product(a, b), a.double() @ b.double(), a, b)


@pytest.mark.usefixtures("used_tile_units")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("repeated", [False, True])
def test_batches(repeated, dtype):
    # Float32 has to be as large as the pieces that such products are cut into.
    m, k, n = (128, 128, 2048) if dtype == torch.float32 else (130, 200, 310)
    a = torch.randn(5, m, k).to(dtype)
    b = torch.randn(1 if repeated else 5, k, n).to(dtype)
    assert_accurate(product(a, b), a.double() @ b.double(), a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_bias_and_relu(activation, dtype):
    a, b, bias = (torch.randn(*s).to(dtype) for s in [(300, 513), (513, 333), (333,)])
    attributes = {"activation": activation} if activation else {}
    expected = a.double() @ b.double() + bias.double()
    if activation:
        expected = expected.relu()
    assert_accurate(product(a, b, bias, **attributes), expected, a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaled_and_added(dtype):
    a, b, c = (torch.randn(*s).to(dtype) for s in [(300, 513), (513, 333), (300, 333)])
    expected = 0.5 * (a.double() @ b.double()) - 2 * c.double()
    assert_accurate(product(a, b, c, alpha=0.5, beta=-2.0), expected, a, b)


def test_mask_of_relu():
    a, b, mask = (torch.randn(*s) for s in [(300, 513), (513, 333), (300, 333)])
    expected = torch.where(mask <= 0, 0.0, a.double() @ b.double())
    assert_accurate(product(a, b, None, mask), expected, a, b)


@pytest.mark.usefixtures("used_tile_units")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(300, 60, 2100), (519, 300, 259), (520, 1100, 300)], ids=str)
def test_the_end_of_a_product_in_strips(size, dtype):
    """More blocks along a row than a strip has; parts of blocks; several sections of the depth."""
    m, k, n = size
    a, b, bias, mask = (torch.randn(*s).to(dtype) for s in [(m, k), (k, n), (n,), (m, n)])
    expected = (a.double() @ b.double() + bias.double()).relu()
    assert_accurate(product(a, b, bias, activation="relu"), expected, a, b)
    expected = torch.where(mask <= 0, 0.0, a.double() @ b.double())
    assert_accurate(product(a, b, None, mask), expected, a, b)
    expected = 0.5 * (a.double() @ b.double()) - 2 * mask.double()
    assert_accurate(product(a, b, mask, alpha=0.5, beta=-2.0), expected, a, b)


@pytest.mark.parametrize("of_a", [torch.Tensor.contiguous, transposed], ids=["a", "a.t"])
@pytest.mark.parametrize("size", [(128, 200, 1024), (131, 120, 2048)], ids=str)
def test_rows_that_evict_each_other(size, of_a):
    """They are copied for vectors; these products are too small for the units."""
    m, k, n = size
    a, b = of_a(torch.randn(m, k)), torch.randn(k, n)
    assert_as_exact_as_one_sum(product(a, b), a.double() @ b.double(), k, 0.0)


def test_whole_numbers_are_exact():
    a, b = (torch.randint(-100, 100, s).float() for s in [(300, 700), (700, 300)])
    assert torch.equal(product(a, b), (a.double() @ b.double()).float())


def test_the_identity_changes_no_bit():
    a = torch.randn(512, 512) * torch.logspace(-25, 25, 512)
    assert torch.equal(product(a, torch.eye(512)), a)
    assert torch.equal(product(torch.eye(512), a), a)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
def test_large_and_small_numbers(scale):
    a, b = torch.randn(200, 600) * scale, torch.randn(600, 300)
    expected = a.double() @ b.double()
    error = (product(a, b).double() - expected).abs().max()
    assert error <= 1e-6 * expected.abs().max()


SPECIAL = [torch.inf, -torch.inf, torch.nan]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", SPECIAL, ids=str)
@pytest.mark.parametrize("size", [(130, 520, 515), (700, 1030, 300)], ids=str)
def test_infinities_and_nan(size, value, dtype):
    """They reach their row or column, and nothing else."""
    m, k, n = size
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    a[3, 5] = a[3, 1] = value
    b[k - 1, 7] = value
    b[5, 9] = 0.0
    actual, expected = product(a, b), a.double() @ b.double()
    torch.testing.assert_close(actual.isnan(), expected.isnan())
    torch.testing.assert_close(actual.isinf(), expected.isinf())
    infinite = expected.isinf()
    assert torch.equal(actual[infinite].double(), expected[infinite])
    finite = expected.isfinite()
    scale = expected[finite].abs().max()
    tolerance = {torch.float32: 3e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}[dtype] * scale
    torch.testing.assert_close(actual[finite].double(), expected[finite], rtol=0, atol=tolerance)


def test_any_bits_of_nan():
    a = torch.randn(128, 512)
    a.view(torch.int32)[4, 4] = -1
    a.view(torch.int32)[9, 4] = 0x7F800001
    rows = product(a, torch.randn(512, 512)).isnan().all(dim=1)
    assert rows.nonzero().flatten().tolist() == [4, 9]


def test_the_largest_numbers():
    """They are finite, although the nearest bfloat16 is not."""
    largest = torch.finfo(torch.float32).max
    a, b = torch.zeros(128, 512), torch.zeros(512, 512)
    a[range(128), range(128)] = largest
    b[range(512), range(512)] = 1.0
    b[0, 0] = -1.0
    assert torch.equal(product(a, b), a @ b)


@pytest.mark.parametrize("sign", [1, -1])
def test_products_beyond_float32_are_infinite(sign):
    a = torch.full((128, 512), 1.2345e25)
    b = torch.full((512, 512), sign * 9.8765e24)
    assert torch.equal(product(a, b), torch.full((128, 512), sign * torch.inf))


def test_float16_sums_beyond_float16_are_infinite():
    a = torch.full((128, 512), 300.0, dtype=torch.float16)
    b = torch.full((512, 512), 300.0, dtype=torch.float16)
    assert product(a, b).eq(torch.inf).all()


def test_a_product_of_part_of_a_larger_matrix():
    wide = torch.full((700, 900), torch.nan)
    a, b = wide[3:303, 5:518], torch.randn(513, 333)
    a.copy_(torch.randn(a.shape))
    assert_accurate(product(a, b), a.double() @ b.double(), a, b)


@pytest.mark.skipif(not _native.has_tile_units(), reason="needs a processor with matrix units")
def test_software_and_units_compute_the_same_bits():
    operands = [
        (torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype))
        for dtype in DTYPES
        for m, k, n in SIZES
    ]
    results = {}
    for emulated in (True, False):
        _native.emulate_tile_units(emulated)
        results[emulated] = [product(a, b) for a, b in operands]
    assert all(map(torch.equal, results[True], results[False]))
