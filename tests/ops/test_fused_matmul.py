"""What rides on a matrix product: relu, the mask of relu's gradient, SGD; and half products."""

import pytest
import torch

from popsim_torch.errors import InternalError
from tests.ops.one_op import run_op, transposed

HALVES = [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, *HALVES]
TOLERANCES = {torch.float32: 3e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
# Short rows, a short depth, more than one tile, odd sizes, and what oneDNN computes.
SIZES = [(1, 3, 5), (32, 100, 10), (33, 131, 77), (64, 20, 48), (100, 32, 320), (200, 90, 130)]


def product(a, b, bias=None, mask=None, **attributes) -> torch.Tensor:
    shape = (a.shape[0], b.shape[1])
    return run_op("matmul", [a, b, bias, mask], [(a.dtype, shape)], **attributes)[0]


def assert_close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    largest = max(exact.abs().max().item(), 1e-3)
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=TOLERANCES[ours.dtype] * largest)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, transposed], ids=["rows", "columns"])
def test_relu_with_and_without_bias(dtype, size, layout):
    m, k, n = size
    a, b, bias = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), torch.randn(n).to(dtype)
    exact = a.double() @ b.double()
    assert_close(product(a, layout(b), activation="relu"), exact.relu())
    ours = product(layout(a), layout(b), bias, activation="relu")
    assert_close(ours, (exact + bias.double()).relu())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("size", [(1, 3, 5), (5, 1, 3), (16, 30, 40), (200, 90, 130)], ids=str)
def test_relu_lets_nan_through(dtype, size):
    m, k, n = size
    a, b = torch.rand(m, k).to(dtype), -torch.rand(k, n).to(dtype)
    a[-1] = torch.nan
    ours = product(a, b, activation="relu")
    assert ours[-1].isnan().all()
    assert (ours[:-1] == 0).all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_mask(dtype, size):
    m, k, n = size
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    mask = torch.randn(m, n).to(dtype)
    mask[0, 0] = torch.nan  # open, as in PyTorch's gradient of relu
    ours = product(a, b, None, mask)
    wanted = torch.ops.aten.threshold_backward(a.double() @ b.double(), mask.double(), 0)
    if dtype == torch.float64:
        torch.testing.assert_close(ours, wanted)
    else:
        assert_close(ours, wanted)


def test_an_unknown_activation_is_refused():
    with pytest.raises(InternalError, match="attribute 'activation' allows"):
        product(torch.ones(2, 3), torch.ones(3, 4), activation="tanh")


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(InternalError, match="the mask has the dtype and shape"):
        product(torch.ones(2, 3), torch.ones(3, 4), None, torch.ones(4, 2))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("layout_b", [torch.Tensor.contiguous, transposed], ids=["b", "b.t"])
@pytest.mark.parametrize("layout_a", [torch.Tensor.contiguous, transposed], ids=["a", "a.t"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_large_half_products(dtype, layout_a, layout_b, with_bias):
    a, b = torch.randn(203, 544).to(dtype), torch.randn(544, 96).to(dtype)
    bias = torch.randn(96).to(dtype) if with_bias else None
    exact = a.double() @ b.double()
    ours = product(layout_a(a), layout_b(b), bias)
    assert_close(ours, exact if bias is None else exact + bias.double())
    ours = product(layout_a(a), layout_b(b), bias, activation="relu")
    assert_close(ours, (exact if bias is None else exact + bias.double()).relu())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_large_half_products_of_a_batch(dtype):
    a, b = torch.randn(3, 128, 96).to(dtype), torch.randn(3, 96, 160).to(dtype)
    for right in (b, b.mT.contiguous().mT, b[:1]):
        exact = a.double() @ right.double()
        ours = run_op("matmul", [a, right], [(dtype, (3, 128, 160))])[0]
        assert_close(ours, exact)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_large_half_products_of_infinities(dtype, value):
    a, b = torch.rand(128, 128).to(dtype) + 1, torch.rand(128, 128).to(dtype) + 1
    a[3, 5] = value
    ours = product(a, b)
    torch.testing.assert_close(ours[3], torch.full((128,), value, dtype=dtype), equal_nan=True)
    assert_close(ours[4:], a[4:].double() @ b.double())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_large_half_products_of_extreme_numbers(dtype):
    info = torch.finfo(dtype)
    tiny = torch.full((96, 96), info.smallest_normal, dtype=dtype)
    tiny[:, ::2] = info.smallest_normal / 16 if dtype == torch.float16 else info.smallest_normal
    ones = torch.ones(96, 96, dtype=dtype)
    assert_close(product(tiny, ones), tiny.double() @ ones.double())
    large = torch.full((96, 96), info.max, dtype=dtype)
    identity = torch.eye(96, dtype=dtype)
    assert torch.equal(product(large, identity), large)


def updated(weight, a, b, decay, rate):
    """One step of SGD on a product."""
    scalars = torch.tensor(decay), torch.tensor(rate)
    return run_op("sgd_product_update", [weight, a, b, *scalars], [0])[0]


@pytest.mark.parametrize("size", [(2, 1, 8), (10, 32, 100), (33, 7, 50), (320, 32, 784)], ids=str)
@pytest.mark.parametrize("layout", [torch.Tensor.contiguous, transposed], ids=["a", "a.t"])
def test_sgd_on_a_product(size, layout):
    m, k, n = size
    weight, a, b = torch.randn(m, n), layout(torch.randn(m, k)), torch.randn(k, n)
    expected = 0.9 * weight.double() - 0.1 * (a.double() @ b.double())
    torch.testing.assert_close(
        updated(weight, a, b, 0.9, 0.1).double(), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("weight", "a", "b", "message"),
    [
        (torch.ones(4, 5), torch.ones(4, 3), torch.ones(3, 6), r"input 0 has shape \(4, 6\)"),
        (torch.ones(5, 4).t(), torch.ones(4, 3), torch.ones(3, 5), "output 0 is contiguous"),
        (torch.ones(4, 5), torch.ones(4, 3), torch.ones(6, 10)[::2, ::2], "no code for a product"),
    ],
)
def test_wrong_operands_of_sgd_on_a_product(weight, a, b, message):
    with pytest.raises(InternalError, match=message):
        updated(weight, a, b, 1.0, 0.1)
