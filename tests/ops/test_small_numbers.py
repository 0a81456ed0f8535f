"""Large products and convolutions of numbers near float32's smallest ones: whoever looks for
gradients that vanish sees them as eager PyTorch has them.
"""

import pytest
import torch

from tests.ops.convolution_problem import ConvolutionProblem
from tests.ops.test_large_matmul import product
from tests.sweeps import sampled

pytestmark = pytest.mark.usefixtures("used_tile_units")

SIZE = (130, 2085, 163)
SMALLEST = 2.0**-149


def assert_right(actual, expected, magnitude, depth):
    """The error of each element is float32's for a sum of `depth` products, whose magnitudes add
    up to `magnitude`: roundings, relative to that or of the smallest number, that add up like a
    random walk."""
    error = (actual.double() - expected).abs()
    allowed = depth**0.5 * (2.0**-24 * magnitude + 2 * SMALLEST)
    assert (error <= allowed).all(), (error / allowed).max()


def assert_right_product(a, b):
    exact_a, exact_b = a.double(), b.double()
    magnitude = exact_a.abs() @ exact_b.abs()
    assert_right(product(a, b), exact_a @ exact_b, magnitude, a.shape[1])


# The results are about 30 times the product of two scales: down to denormal results of ordinary
# operands, and to operands that are denormal themselves.
SCALES = [
    *((1.0, scale) for scale in (1e-20, 1e-30, 1e-34, 1e-36, 1e-38, 1e-40, 1e-43)),
    *((1e-15, 1e-15), (1e-18, 1e-19), (1e-20, 1e-21), (1e-22, 1e-23), (1e15, 1e-44), (1e9, 1e-38)),
]
# Denormal results of ordinary operands, and denormal, small, and large operands.
QUICK = [(1.0, 1e-36), (1.0, 1e-43), (1e-20, 1e-21), (1e15, 1e-44), (1e9, 1e-38)]


@pytest.mark.parametrize("scales", sampled(SCALES, QUICK), ids=str)
@pytest.mark.parametrize("swapped", [False, True])
def test_products_at_a_scale(scales, swapped):
    m, k, n = SIZE
    of_a, of_b = reversed(scales) if swapped else scales
    assert_right_product(torch.randn(m, k) * of_a, torch.randn(k, n) * of_b)


def spread(count):
    """Powers of ten from float32's denormal numbers to large ones, in no order."""
    return torch.logspace(-42, 8, count, dtype=torch.float64)[torch.randperm(count)]


def matrix(rows, columns, scale):
    return (torch.randn(rows, columns, dtype=torch.float64) * scale).float()


def test_rows_of_all_magnitudes():
    m, k, n = SIZE
    assert_right_product(matrix(m, k, spread(m)[:, None]), torch.randn(k, n))


def test_columns_of_all_magnitudes():
    m, k, n = SIZE
    assert_right_product(torch.randn(m, k), matrix(k, n, spread(n)))


def test_rows_and_columns_of_all_magnitudes():
    m, k, n = SIZE
    assert_right_product(matrix(m, k, spread(m)[:, None]), matrix(k, n, spread(n)))


@pytest.mark.parametrize("largest", [1e3, 1e10])
def test_large_numbers_that_meet_zeros_beside_small_ones(largest):
    m, k, n = SIZE
    a, b = torch.randn(m, k) * 1e-38, torch.randn(k, n)
    a[:, ::2] = torch.randn(m, (k + 1) // 2) * largest
    b[::2] = 0.0
    assert_right_product(a, b)


def test_magnitudes_that_make_up_for_each_other_along_the_depth():
    m, k, n = SIZE
    scale = torch.logspace(-32, 4, k, dtype=torch.float64)[torch.randperm(k)]
    assert_right_product(matrix(m, k, scale), matrix(k, n, 1e-26 / scale[:, None]))


def test_the_identity_changes_no_bit_of_any_number():
    bits = torch.randint(-(2**31), 2**31 - 1, (512, 512)).to(torch.int32)
    a = bits.view(torch.float32)
    a = torch.where(a.abs() < 1e15, a, 0.0)  # larger ones take another way
    a[:, :32] = SMALLEST
    assert torch.equal(product(a, torch.eye(512)), a)
    assert torch.equal(product(torch.eye(512), a), a)


@pytest.mark.parametrize("scale", [1e-3, 1e-5, 1e-7])
def test_products_of_float16(scale):
    a, b = (torch.randn(96, 128) * scale).half(), torch.randn(128, 96).half()
    exact, magnitude = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    error = (product(a, b).double() - exact).abs()
    rounding = (2.0**-11 * exact.abs()).clamp(min=2.0**-25)
    assert (error <= rounding + 2.0**-17 * magnitude).all()


# Unlike eager's.
@pytest.mark.parametrize("scales", SCALES, ids=str)
def test_products_of_bfloat16(scales):
    of_a, of_b = scales
    a, b = (torch.randn(96, 128) * of_a).bfloat16(), (torch.randn(128, 96) * of_b).bfloat16()
    exact, magnitude = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    error = (product(a, b).double() - exact).abs()
    rounding = (2.0**-8 * exact.abs()).clamp(min=2.0**-134)
    assert (error <= 1.01 * rounding + 2.0**-20 * magnitude).all()


class Convolution(ConvolutionProblem):
    """One whose results are compared with those in float64."""

    def __init__(self, of_x=1.0, of_weight=1.0, of_grad_y=1.0):
        super().__init__(((2, 64, 40, 40), (64, 64, 3, 3), 1, 1, 1))
        self.bias.zero_()
        self.x.copy_(self.x.double() * of_x)
        self.weight.copy_(self.weight.double() * of_weight)
        self.grad_y.copy_(self.grad_y.double() * of_grad_y)

    def assert_right(self):
        exact = self.eager(torch.float64)
        results = [self.forward(), self.grad_x(), self.grad_weight()]
        for values in (*self.operands, self.grad_y):
            values.abs_()
        magnitudes = self.eager(torch.float64)
        depths = 64 * 9, 64 * 9, 2 * 40 * 40
        for each in zip(results, exact, magnitudes, depths, strict=False):
            assert_right(*each)


@pytest.mark.parametrize("scales", sampled(SCALES, QUICK), ids=str)
@pytest.mark.parametrize("first", ["x", "weight", "grad_y"])
def test_convolutions_at_a_scale(scales, first):
    one, other = scales
    others = {"of_x": other, "of_weight": other, "of_grad_y": other}
    Convolution(**(others | {f"of_{first}": one})).assert_right()


def test_convolutions_of_channels_of_all_magnitudes():
    Convolution(of_x=spread(64)[:, None, None], of_grad_y=spread(64)[:, None, None]).assert_right()


def test_convolutions_of_positions_of_all_magnitudes():
    scale = spread(1600).reshape(40, 40)
    Convolution(of_x=scale, of_grad_y=scale).assert_right()


def test_convolutions_with_weights_of_all_magnitudes():
    Convolution(of_weight=spread(64)[:, None, None, None]).assert_right()
