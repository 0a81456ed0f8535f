"""Ops that may compute with fewer bits of float32 operands.

``bf16``: of each operand the nearest bfloat16 number counts, and sums are float32. ``tf32``: of
each operand two bfloat16 numbers count, 16 bits. So each product of a sum is off by at most
``SHARE`` of it. Processors without matrix units, and products that do not pay off on them, use all
bits.
"""

import pytest
import torch

from popsim_torch import _native
from popsim_torch.errors import InternalError
from tests.ops.convolution_problem import ConvolutionProblem
from tests.ops.num_threads import threads
from tests.ops.one_op import LAYOUTS, run_op
from tests.ops.test_attention import Case as Attention
from tests.ops.test_large_convolution import CASES as CONVOLUTIONS
from tests.ops.test_recurrent import GATES, MODES, Layer, Program, assert_layer

pytestmark = pytest.mark.usefixtures("tile_units")
F32 = torch.float32
# Two operands are off by half a unit of the last of 8 bits each. Two parts omit the product of the
# second parts and what the second parts lose, 2^-18 each.
SHARE = {"bf16": 2**-8 + 2**-18, "tf32": 3 * 2**-18, None: 0.0}
PRECISIONS = ["tf32", "bf16"]
# Tile products for one pair of tiles, see csrc/dense/tile/block_kernel.h.
TILE_PRODUCTS = {"bf16": 1, "tf32": 3, None: 6}


def product(a, b, precision=None, *rest, **attributes):
    shape = torch.matmul(a.to("meta"), b.to("meta")).shape
    if precision is not None:
        attributes["precision"] = precision
    return run_op("matmul", [a, b, *rest], [(a.dtype, shape)], **attributes)[0]


def assert_within(actual, expected, magnitudes, depth, precision):
    """The error is below that of the rounded operands and of `depth` roundings to float32."""
    bound = (SHARE[precision] + depth * 2**-24) * magnitudes
    assert ((actual.double() - expected).abs() <= bound).all()


def assert_product(actual, a, b, precision):
    magnitudes = a.double().abs() @ b.double().abs()
    assert_within(actual, a.double() @ b.double(), magnitudes, a.shape[-1], precision)


# Whole blocks, edges on all axes, several panels of the depth, few rows, one row, one number.
SIZES = [(128, 512, 512), (257, 519, 271), (130, 2085, 163), (32, 784, 320), (1, 70, 90), (1, 1, 1)]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout_b", LAYOUTS)
@pytest.mark.parametrize("layout_a", LAYOUTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products(size, layout_a, layout_b, precision):
    m, k, n = size
    a, b = torch.randn(m, k), torch.randn(k, n)
    assert_product(product(LAYOUTS[layout_a](a), LAYOUTS[layout_b](b), precision), a, b, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shared", [False, True])
def test_batches_of_products(shared, precision):
    a, b = torch.randn(5, 130, 200), torch.randn(1 if shared else 5, 200, 310)
    assert_product(product(a, b, precision), a, b, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_follows_a_product(precision):
    a, b, bias, mask = (torch.randn(*s) for s in [(300, 513), (513, 333), (333,), (300, 333)])
    whole = a.double() @ b.double()
    magnitudes = a.double().abs() @ b.double().abs() + bias.double().abs()
    for rest, attributes, expected in [
        ((bias,), {}, whole + bias.double()),
        ((bias,), {"activation": "relu"}, (whole + bias.double()).relu()),
        ((None, mask), {}, torch.where(mask <= 0, 0.0, whole)),
    ]:
        ours = run_op(
            "matmul",
            [a, b, *rest],
            [(F32, mask.shape)],
            precision=precision,
            has_reference=False,  # numbers near zero
            **attributes,
        )[0]
        assert_within(ours, expected, magnitudes, 514, precision)


def nearest(tensor):
    """Return the nearest bfloat16 numbers, ties away from zero."""
    bits = (tensor.view(torch.int32) + 0x8000) & -0x10000
    return bits.view(torch.float32).double()


def test_bfloat16_operands_with_float32_sums():
    if not _native.multiplies_tiles(1):
        pytest.skip("instructions for bfloat16, or emulated units")
    a, b = torch.randn(300, 700), torch.randn(700, 200)
    near = [nearest(t) for t in (a, b)]
    expected, ours = near[0] @ near[1], product(a, b, "bf16").double()
    assert (ours - expected).abs().max() <= 700 * 2**-24 * (near[0].abs() @ near[1].abs()).max()
    # The same is far from the product of all bits.
    assert (ours - a.double() @ b.double()).abs().max() > 0.01


@pytest.mark.parametrize("precision", [None, *PRECISIONS])
def test_fewer_bits_need_fewer_tile_products(precision, tile_units):
    if tile_units == "processor":
        pytest.skip("only emulated units count")
    before = _native.num_emulated_products()
    a, b = torch.randn(256, 512), torch.randn(512, 256)
    product(a, b, precision)
    assert _native.num_emulated_products() - before == TILE_PRODUCTS[precision] * 16 * 16 * 16


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("scales", [(1e-30, 1e-2), (1e-36, 1e10), (1e-20, 1e20), (1e30, 1e-30)])
def test_small_and_large_numbers(scales, precision):
    a, b = torch.randn(200, 300) * scales[0], torch.randn(300, 200) * scales[1]
    assert_product(product(a, b, precision), a, b, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 3.4e38])
def test_infinities_and_nan(value, precision):
    a, b = torch.randn(200, 300), torch.randn(300, 200).abs() + 0.5
    a[3, 5] = value
    ours = product(a, b, precision)
    expected = (a.double() @ b.double()).float()
    assert torch.equal(ours[3].isfinite(), expected[3].isfinite())
    assert torch.equal(ours[3].isnan(), expected[3].isnan())
    rest = [i for i in range(200) if i != 3]
    assert_product(ours[rest], a[rest], b, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_updates(precision):
    weight, a, b = torch.randn(300, 200), torch.randn(300, 64), torch.randn(64, 200)
    decay, rate = torch.tensor(0.9), torch.tensor(0.1)
    updated, gradient = run_op(
        "sgd_product_update",
        [weight, a, b, decay, rate],
        [0, (F32, (300, 200))],
        precision=precision,
    )
    assert_product(gradient, a, b, precision)
    expected = 0.9 * weight.double() - 0.1 * gradient.double()
    torch.testing.assert_close(updated.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("slices", ["rows", "columns", "depth"])
def test_serialized_products(slices, precision):
    a, b = torch.randn(128, 256), torch.randn(256, 192)
    ours = run_op(
        *("serialized_matmul", [a, b], [(F32, (128, 192))]),
        **{"slices": slices, "factor": 4, "wide_sums": True, "dtype": "float32"},
        precision=precision,
    )[0]
    assert_product(ours, a, b, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["even", "odd", "strided", "dilated", "sixteen_channels", "line"])
def test_convolutions(name, precision):
    problem = ConvolutionProblem(CONVOLUTIONS[name], precision=precision)
    results = [problem.forward(), problem.grad_x(), problem.grad_weight()]
    expected, depths = problem.eager(torch.float64), problem.counts()
    for tensor in (*problem.operands, problem.grad_y):
        tensor.abs_()
    magnitudes = problem.eager(torch.float64)
    for found in zip(results, expected, magnitudes, depths, strict=True):
        assert_within(*found, precision)


@pytest.mark.parametrize("precision", [None, *PRECISIONS])
def test_fewer_bits_need_fewer_tile_products_in_convolutions(precision, tile_units):
    if tile_units == "processor" or not _native.has_onednn():
        pytest.skip("only emulated units count, and only beside oneDNN")
    attributes = {} if precision is None else {"precision": precision}
    problem = ConvolutionProblem(CONVOLUTIONS["even"], **attributes)
    for run in (problem.forward, problem.grad_x, problem.grad_weight):
        before = _native.num_emulated_products()
        run()
        count = _native.num_emulated_products() - before
        assert count > 0 and count % TILE_PRODUCTS[precision] == 0
        assert precision is not None or count % 6 == 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention(precision):
    case = Attention((4, 300, 130, 64, 65), F32, "rows and columns", precision=precision)
    out, gradients = case.expected()
    share = {"bf16": 2e-2, "tf32": 1e-4}[precision]
    for mine, theirs in zip([*case.forward(), *case.backward()], [out, *gradients], strict=True):
        assert (mine.double() - theirs).abs().max() <= share * theirs.abs().max()


# Steps, batch, inputs, hidden: few rows; part of a vector of units; more rows than a block has;
# depths that are no multiple of a step of the units.
LAYERS = [(12, 16, 64, 96), (40, 12, 5, 70), (6, 40, 33, 50), (6, 33, 16, 34)]


# The gradient of relu jumps where a rounded sum is zero.
@pytest.mark.parametrize("size", LAYERS, ids=str)
@pytest.mark.parametrize(
    ("mode", "precision"),
    [(m, p) for m in MODES for p in PRECISIONS if (m, p) != ("rnn_relu", "bf16")],
)
def test_recurrent_layers(mode, precision, size):
    assert_layer(Layer(mode, *size, precision=precision))


def forward(layer, operands):
    program = Program(layer)
    outputs = program.forward([program.input(operand) for operand in operands])
    return program.run([output for output in outputs if output is not None])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("mode", MODES)
def test_steps_of_a_recurrent_layer_use_the_units(mode, precision, tile_units):
    if tile_units != "emulated":
        pytest.skip("only emulated units count")
    if _native.target() not in ("avx512", "amx"):
        pytest.skip("the steps use the units only beside vectors of 16 numbers")
    layer = Layer(mode, 12, 16, 1, 64, precision=precision)
    before = _native.num_emulated_products()
    forward(layer, layer.operands())
    # One tile of rows; two steps of the units along the depth.
    products = 12 * GATES[mode] * (64 // 16) * 2
    assert _native.num_emulated_products() - before == TILE_PRODUCTS[precision] * products


@pytest.mark.parametrize("value", [1e30, float("inf"), float("nan")])
@pytest.mark.parametrize("where", [1, 4], ids=["h0", "weight"])
@pytest.mark.parametrize("mode", ["lstm", "gru"])
def test_steps_with_numbers_that_units_cannot_multiply(mode, where, value):
    """They are multiplied whole: the results are those of the whole precision."""
    whole, reduced = (Layer(mode, 10, 40, 3, 48, precision=p) for p in (None, "tf32"))
    torch.manual_seed(0)
    operands = whole.operands()
    operands[where][7, 5] = value
    results = zip(forward(whole, operands), forward(reduced, operands), strict=True)
    for expected, actual in results:
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("size", [(12, 16, 8, 128), (5, 80, 8, 64)], ids=["units", "rows"])
@pytest.mark.parametrize("mode", ["lstm", "gru"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_threads_change_no_bit_of_steps_on_the_units(precision, mode, size):
    layer = Layer(mode, *size, precision=precision)
    torch.manual_seed(0)
    operands = layer.operands()
    results = []
    for number in (1, 2, 3):
        with threads(number):
            results.append(forward(layer, operands))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_are_refused(dtype):
    a = torch.ones(3, 3, dtype=dtype)
    with pytest.raises(InternalError, match="precision is for float32 operands"):
        product(a, a, "bf16")


def test_other_precisions_are_refused():
    a = torch.ones(3, 3)
    with pytest.raises(InternalError, match="attribute 'precision' allows 'medium'"):
        product(a, a, "medium")
