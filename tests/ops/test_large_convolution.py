"""Convolutions of images with their channels last that are large enough for a processor's matrix
units.

Those read their operands from padded images in parts of bfloat16. What has to hold on any
processor, and with software for the units: errors as small as those of eager PyTorch's float32, or
of one sum where oneDNN or ATen computes, and the right infinities and NaN.
"""

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch import _native
from tests.ops.accuracy import assert_as_exact_as_one_sum
from tests.ops.convolution_problem import ConvolutionProblem
from tests.ops.images import run_image_op
from tests.ops.num_threads import threads
from tests.sweeps import combined, sampled

pytestmark = pytest.mark.usefixtures("tile_units")
# Rounding once to the type of the result, as a share of the largest value.
ROUNDING = {torch.float32: 0.0, torch.float16: 2**-11}
# Shapes of x and weight, stride, padding, dilation: for each of the ways in which channels, taps
# and rows of images lie side by side.
CASES = {
    "even": ((2, 64, 40, 40), (64, 64, 3, 3), 1, 1, 1),
    "odd": ((2, 61, 47, 53), (90, 61, 4, 3), 1, (2, 1), 1),
    "strided": ((3, 128, 61, 63), (160, 128, 3, 3), 2, 1, 1),
    "stride_on_one_axis": ((2, 64, 60, 65), (64, 64, 5, 5), (3, 1), 2, 1),
    "dilated": ((2, 64, 40, 40), (64, 64, 3, 3), 1, 2, 2),
    "dilated_strided": ((2, 64, 81, 81), (96, 64, 5, 5), 2, 3, 3),
    "even_dilation_strided": ((2, 64, 81, 81), (96, 64, 5, 5), 2, 2, 2),
    "sixteen_channels": ((2, 16, 60, 60), (64, 16, 5, 5), 1, 2, 1),
    "thirteen_channels": ((2, 13, 90, 90), (128, 13, 7, 6), 1, 2, 1),
    "sixteen_channels_strided": ((2, 16, 90, 92), (96, 16, 7, 6), 2, 3, 1),
    "sixteen_channels_dilated": ((2, 16, 64, 64), (128, 16, 5, 4), 1, 2, 2),
    "into_sixteen": ((2, 64, 60, 60), (16, 64, 5, 4), 1, 1, 1),
    "into_sixteen_strided": ((1, 128, 90, 90), (16, 128, 8, 8), 2, 2, 1),
    "into_sixteen_dilated": ((2, 128, 60, 90), (16, 128, 5, 4), (1, 2), 1, (1, 3)),
    "bands": ((1, 96, 91, 33), (96, 96, 3, 3), 1, 1, 1),
    "bands_strided": ((1, 96, 131, 67), (96, 96, 3, 3), 2, 1, 1),
    "many_weights": ((5, 256, 14, 15), (320, 256, 3, 3), 1, 1, 1),
    "line": ((2, 96, 2000), (96, 96, 9), 1, 4, 1),
    "volume": ((2, 32, 12, 20, 27), (64, 32, 3, 3, 3), 1, 1, 1),
    "volume_strided": ((1, 64, 9, 30, 40), (96, 64, 3, 3, 3), (1, 2, 2), 1, 1),
    "much_padding": ((2, 64, 20, 20), (64, 64, 3, 3), 1, 4, 1),
}
SHARED = CASES["even"]


def assert_accurate(actual, expected, eager, counts, dtype):
    """The units' error is of the size of eager float32's, plus rounding. (Eager adds in another
    order, in some of the passes along several sums, with errors down to a third of one sum's.)"""
    assert actual.dtype == dtype
    if not (_native.has_tile_units() and _native.has_onednn()):
        assert_as_exact_as_one_sum(actual, expected, counts, ROUNDING[dtype])
        return
    rounding = ROUNDING[dtype] * expected.abs().max()
    error = (actual.double() - expected).abs().max()
    assert error <= 4 * (eager.double() - expected).abs().max() + rounding * 1.01


# float32 runs on every way; float16, which differs in how operands are read, on one of each kind.
IN_HALF = ["odd", "strided", "dilated", "sixteen_channels", "into_sixteen", "line"]


@pytest.mark.usefixtures("used_tile_units")
@pytest.mark.parametrize(
    ("name", "dtype"),
    combined(CASES, ROUNDING, quick=lambda name, dtype: dtype == torch.float32 or name in IN_HALF),
)
def test_accuracy(name, dtype):
    problem = ConvolutionProblem(CASES[name], dtype)
    results = [problem.forward(), problem.grad_x(), problem.grad_weight()]
    for result, *expected in zip(
        results,
        problem.eager(torch.float64),
        problem.eager(torch.float32),
        problem.counts(),
        strict=True,
    ):
        assert_accurate(result, *expected, dtype)


def test_without_bias():
    problem = ConvolutionProblem(SHARED)
    (y,) = run_image_op(
        "convolution",
        [problem.x, problem.weight],
        [(torch.float32, problem.grad_y.shape)],
        problem.attributes,
        channels_last=True,
    )
    expected = problem.forward()
    # oneDNN's code for SSE begins its sums with the bias: 577 numbers, about 24 in all, are rounded
    # otherwise. One rounding of 24 is 1e-6.
    rounding = 1e-4 if poptorch.build_info().target == "sse4" else 0.0
    torch.testing.assert_close(y + problem.bias[:, None, None], expected, rtol=0.0, atol=rounding)


@pytest.mark.parametrize("name", ["even", "strided", "sixteen_channels"])
def test_whole_numbers_are_exact(name):
    problem = ConvolutionProblem(CASES[name])
    for values in (*problem.operands, problem.grad_y):
        values.copy_(torch.randint(-20, 20, values.shape))
    y, grad_x, grad_weight = problem.eager(torch.float64)
    assert torch.equal(problem.forward(), y.float())
    assert torch.equal(problem.grad_x(), grad_x.float())
    assert torch.equal(problem.grad_weight(), grad_weight.float())


def test_a_single_tap_copies_every_bit():
    problem = ConvolutionProblem(SHARED)
    problem.weight.zero_()
    problem.weight[range(64), range(64), 1, 1] = 1.0
    problem.bias.zero_()
    assert torch.equal(problem.forward(), problem.x)
    assert torch.equal(problem.grad_x(), problem.grad_y)


EXTREME = {
    "inf": float("inf"),
    "-inf": float("-inf"),
    "nan": float("nan"),
    "nan of all bits": torch.tensor(-1, dtype=torch.int32).view(torch.float32),
    "large": 3.4e38,
}


@pytest.mark.parametrize("value", EXTREME)
@pytest.mark.parametrize("where", ["x", "weight", "grad_y"])
def test_extreme_values_are_seen_where_eager_has_them(where, value):
    problem = ConvolutionProblem(SHARED)
    getattr(problem, where)[1, 2, 0, 1] = EXTREME[value]
    results = [problem.forward(), problem.grad_x(), problem.grad_weight()]
    for actual, expected in zip(results, problem.eager(torch.float32), strict=True):
        finite = expected.isfinite()
        assert torch.equal(actual.isnan(), expected.isnan())
        assert torch.equal(actual.isfinite(), finite)
        assert torch.equal(actual[expected.isinf()], expected[expected.isinf()])
        scale = expected[finite].abs().max()
        assert (actual - expected)[finite].abs().max() <= 1e-5 * scale


def test_products_that_overflow_are_infinite():
    problem = ConvolutionProblem(SHARED)
    problem.x.abs_().mul_(1e30)
    problem.weight.abs_().mul_(1e30)
    assert torch.equal(problem.forward(), torch.full_like(problem.grad_y, float("inf")))


def test_every_run_is_the_same():
    problem = ConvolutionProblem(SHARED)
    first = [problem.forward(), problem.grad_x(), problem.grad_weight()]
    second = [problem.forward(), problem.grad_x(), problem.grad_weight()]
    assert all(map(torch.equal, first, second))


@pytest.mark.usefixtures("used_tile_units")
@pytest.mark.parametrize(
    "name",
    sampled(
        ["bands", "many_weights", "sixteen_channels", "line", "volume"],
        quick=["bands", "many_weights", "sixteen_channels"],
    ),
)
def test_any_number_of_threads_gives_the_same_bits(name):
    problem = ConvolutionProblem(CASES[name])
    expected = []
    for count in (1, 2, 3, 5):
        with threads(count):
            actual = [problem.forward(), problem.grad_x(), problem.grad_weight()]
        expected = expected or actual
        assert all(map(torch.equal, actual, expected)), count
