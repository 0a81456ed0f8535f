"""What rides on a matrix product changes no bit of it, and rounds as an op of its own does.

An anchor decides what is fused: it must not decide about the last bit of a weight. So one
implementation has to compute a product with and without what follows it, on any processor.
"""

import itertools

import pytest
import torch

from popsim_torch._native import Fusion, product_can_fuse
from tests.ops.one_op import run_op, transposed

# Rows, depth, columns: one of each, less than a vector, whole ones and a bit, short in one axis,
# long in all.
SHORT = list(itertools.product((1, 3, 13, 33), (1, 4, 33), (1, 3, 5, 8, 17)))
LONG = [(1, 700, 90), (90, 700, 1), (7, 1000, 130), (40, 1500, 70), (130, 1000, 7), (200, 90, 130)]
LONG += [(100, 32, 320), (20, 1500, 320)]  # short, with much to do
LAYOUTS = list(itertools.product([torch.Tensor.contiguous, transposed], repeat=2))


def product(a, b, bias=None, mask=None, **attributes) -> torch.Tensor:
    shape = (a.shape[0], b.shape[1])
    return run_op("matmul", [a, b, bias, mask], [(a.dtype, shape)], **attributes)[0]


def operands(size):
    """Return a and b in all layouts."""
    m, k, n = size
    a, b = torch.randn(m, k), torch.randn(k, n)
    return [(of_a(a), of_b(b)) for of_a, of_b in LAYOUTS]


def can_fuse(what, a, b) -> bool:
    dtype = str(a.dtype).removeprefix("torch.")
    return product_can_fuse(what, dtype, a.shape, a.stride(), b.shape, b.stride())


@pytest.mark.parametrize("size", SHORT + LONG, ids=str)
def test_bias(size):
    bias = torch.randn(size[2])
    for a, b in operands(size):
        assert torch.equal(product(a, b, bias), product(a, b) + bias)


@pytest.mark.parametrize("size", SHORT + LONG, ids=str)
def test_relu(size):
    bias = torch.randn(size[2])
    for a, b in operands(size):
        if can_fuse(Fusion.RELU, a, b):
            assert torch.equal(product(a, b, activation="relu"), product(a, b).relu())
            expected = product(a, b, bias).relu()
            assert torch.equal(product(a, b, bias, activation="relu"), expected)


@pytest.mark.parametrize("size", SHORT + LONG, ids=str)
def test_mask_of_relu(size):
    m, _, n = size
    mask = torch.randn(m, n)
    for a, b in operands(size):
        if can_fuse(Fusion.MASK, a, b):
            expected = torch.where(mask <= 0, 0.0, product(a, b))
            assert torch.equal(product(a, b, None, mask), expected)


@pytest.mark.parametrize("size", SHORT + LONG, ids=str)
def test_update(size):
    m, _, n = size
    weight, scalars = torch.randn(m, n), [torch.tensor(0.97), torch.tensor(0.123)]
    for a, b in operands(size):
        if can_fuse(Fusion.UPDATE, a, b):
            gradient = product(a, b)
            (expected,) = run_op("sgd_update", [weight, gradient, *scalars], [0])
            (alone,) = run_op("sgd_product_update", [weight, a, b, *scalars], [0])
            assert torch.equal(alone, expected)
            results = [0, (torch.float32, (m, n))]
            new, kept = run_op("sgd_product_update", [weight, a, b, *scalars], results)
            assert torch.equal(new, expected)
            assert torch.equal(kept, gradient)


@pytest.mark.parametrize("what", [Fusion.RELU, Fusion.MASK, Fusion.UPDATE], ids=str)
def test_products_fuse_something(what):
    """The tests above compare more than nothing."""
    assert any(can_fuse(what, a, b) for size in SHORT for a, b in operands(size))
