"""The matmul op, run on the device, against float64 eager PyTorch."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from popsim_torch import _native, ir
from popsim_torch.errors import InternalError
from popsim_torch.passes.native_graph import to_native

# Largest error as a share of the largest value.
TOLERANCES = {
    torch.float64: 1e-13,
    torch.float32: 3e-6,
    torch.float16: 6e-4,
    torch.bfloat16: 5e-3,
}
DTYPES = list(TOLERANCES)


class Product:
    """A program that is one matrix product of tensors that keep their values and strides."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, bias=None, shape=None, **attributes):
        self._graph = ir.Graph()
        self._memory: list[tuple[ir.Tensor, torch.Tensor]] = []
        inputs = [self._variable(value) for value in (a, b, bias) if value is not None]
        if shape is None:
            shape = torch.matmul(a.to("meta"), b.to("meta")).shape
        self._out = self._graph.add_tensor(ir.TensorKind.VARIABLE, a.dtype, shape)
        self._graph.add_op(
            "matmul", inputs, [self._out], attributes, phase=ir.Phase.FORWARD, name="product"
        )
        config = _native.RunConfig(1, 1, False, "sequential")
        with _native.translated_errors():
            self._executable = _native.Executable(to_native(self._graph), config)
            self._executable.load()
        self.write_inputs()

    def _variable(self, value: torch.Tensor) -> ir.Tensor:
        count = value.untyped_storage().nbytes() // value.element_size()
        base = self._graph.add_tensor(ir.TensorKind.VARIABLE, value.dtype, (count,))
        self._memory.append((base, value.as_strided((count,), (1,), 0)))
        return self._graph.add_view(base, value.shape, value.stride(), value.storage_offset())

    def write_inputs(self) -> None:
        for base, memory in self._memory:
            self._executable.write(base.id, memory)

    def run(self) -> torch.Tensor:
        with _native.translated_errors():
            self._executable.run([])
        return self._executable.read(self._out.id)


def expected_product(a, b, bias=None, alpha=1.0, beta=1.0) -> torch.Tensor:
    result = alpha * (a.double() @ b.double())
    if bias is not None and beta != 0:
        result = result + beta * bias.double()
    return result


def assert_product(a, b, bias=None, **attributes) -> None:
    actual = Product(a, b, bias, **attributes).run()
    expected = expected_product(a, b, bias, **attributes)
    assert actual.dtype == a.dtype
    assert actual.shape == expected.shape
    scale = expected.abs().max().item() if expected.numel() else 1.0
    torch.testing.assert_close(
        actual.double(), expected, rtol=0, atol=TOLERANCES[a.dtype] * max(scale, 1e-3)
    )


def matrix(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


# Ways to hold the same matrix: each takes a tensor and returns an equal one.
def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT


def columns_of_a_wider_one(x: torch.Tensor) -> torch.Tensor:
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), torch.nan, dtype=x.dtype)
    wide[..., 2 : 2 + x.shape[-1]] = x
    return wide[..., 2 : 2 + x.shape[-1]]


def every_other_column(x: torch.Tensor) -> torch.Tensor:
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def rows_before_batch(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def batch_last(x: torch.Tensor) -> torch.Tensor:
    return x.permute(1, 2, 0).contiguous().permute(2, 0, 1)


LAYOUTS = [torch.Tensor.contiguous, transposed, columns_of_a_wider_one, every_other_column]
BATCHED_LAYOUTS = [*LAYOUTS, rows_before_batch, batch_last]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [
        (1, 1, 1),
        (1, 784, 100),
        (1000, 33, 1),
        (5, 1, 7),
        (32, 100, 10),
        (17, 129, 65),
        (64, 784, 320),
        (200, 300, 100),
    ],
)
def test_sizes(dtype, m, k, n):
    assert_product(matrix(m, k, dtype=dtype), matrix(k, n, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout_b", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("layout_a", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize(("m", "k", "n"), [(13, 37, 21), (1, 9, 30), (30, 9, 1), (6, 1, 5)])
def test_layouts(dtype, layout_a, layout_b, m, k, n):
    assert_product(layout_a(matrix(m, k, dtype=dtype)), layout_b(matrix(k, n, dtype=dtype)))


@pytest.mark.parametrize(("m", "k", "n"), [(2048, 70, 300), (90, 600, 500), (40, 130, 64)])
def test_columns_of_the_left_operand(m, k, n):
    """Copied where their stride is a power of two, else read where they are."""
    assert_product(transposed(matrix(m, k)), matrix(k, n))


@pytest.mark.parametrize(("m", "k", "n"), [(100, 600, 1000), (200, 50, 2040), (40, 130, 1024)])
@pytest.mark.parametrize("layout_a", LAYOUTS, ids=lambda layout: layout.__name__)
def test_rows_of_the_right_operand_that_lie_far_apart(layout_a, m, k, n):
    """Copied where they are a multiple of 4096 bytes apart; that changes no bit."""
    a, b = layout_a(matrix(m, k)), matrix(k, n)
    far_apart = torch.zeros(k, 2048)
    far_apart[:, :n] = b
    assert_product(a, far_apart[:, :n])
    assert torch.equal(Product(a, far_apart[:, :n]).run(), Product(a, b).run())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout_b", BATCHED_LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("layout_a", BATCHED_LAYOUTS, ids=lambda layout: layout.__name__)
def test_batched_layouts(dtype, layout_a, layout_b):
    a = layout_a(matrix(3, 13, 37, dtype=dtype))
    assert_product(a, layout_b(matrix(3, 37, 21, dtype=dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape_a", "shape_b"),
    [
        ((4, 5, 6), (6, 7)),
        ((5, 6), (4, 6, 7)),
        ((4, 5, 6), (1, 6, 7)),
        ((1, 5, 6), (4, 6, 7)),
        ((1, 5, 6), (1, 6, 7)),
        ((3, 5, 1), (1, 7)),
    ],
)
def test_one_matrix_for_the_whole_batch(dtype, shape_a, shape_b):
    assert_product(matrix(*shape_a, dtype=dtype), matrix(*shape_b, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_expanded_operands(dtype):
    a, b = matrix(1, 5, 6, dtype=dtype), matrix(1, 6, 7, dtype=dtype)
    assert_product(a.expand(4, 5, 6), matrix(4, 6, 7, dtype=dtype))
    assert_product(matrix(4, 5, 6, dtype=dtype), b.expand(4, 6, 7))
    assert_product(a.expand(4, 5, 6), b.expand(4, 6, 7))
    assert_product(matrix(1, 6, dtype=dtype).expand(5, 6), matrix(6, 1, dtype=dtype).expand(6, 7))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "bias_shape", [(7,), (1,), (), (1, 7), (5, 1), (5, 7), (1, 1, 7), (4, 1, 1), (4, 5, 7)], ids=str
)
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.5, 1.0), (1.0, -2.0), (3.0, 0.25)])
def test_bias(dtype, bias_shape, alpha, beta):
    a, b = matrix(4, 5, 6, dtype=dtype), matrix(6, 7, dtype=dtype)
    bias = matrix(*bias_shape, dtype=dtype)
    assert_product(a, b, bias, alpha=alpha, beta=beta)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n"), [(1, 30), (30, 1), (1, 1)])
def test_bias_of_a_vector_product(dtype, m, n):
    a, b = matrix(m, 40, dtype=dtype), matrix(40, n, dtype=dtype)
    assert_product(a, b, matrix(n, dtype=dtype))
    assert_product(a, b, matrix(m, n, dtype=dtype), alpha=2.0, beta=0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_bias(dtype):
    a, b = matrix(5, 6, dtype=dtype), matrix(6, 7, dtype=dtype)
    assert_product(a, b, matrix(14, dtype=dtype)[::2])
    assert_product(a, b, transposed(matrix(5, 7, dtype=dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_with_beta_zero_is_not_read(dtype):
    a, b = matrix(5, 6, dtype=dtype), matrix(6, 7, dtype=dtype)
    bias = torch.full((7,), torch.nan, dtype=dtype)
    assert_product(a, b, bias, beta=0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("m", "k", "n"), [(5, 0, 7), (0, 6, 7), (5, 6, 0), (0, 0, 0)], ids=lambda size: str(size)
)
def test_empty_operands(dtype, m, k, n):
    a, b = torch.zeros(m, k, dtype=dtype), torch.zeros(k, n, dtype=dtype)
    assert_product(a, b)
    assert_product(a, b, matrix(n, dtype=dtype), beta=2.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beta", [1.0, 0.5, 0.0])
def test_alpha_zero_ignores_what_the_operands_hold(dtype, beta):
    a = torch.full((5, 6), torch.nan, dtype=dtype)
    b = torch.full((6, 7), torch.inf, dtype=dtype)
    bias = matrix(7, dtype=dtype) if beta else torch.full((7,), torch.nan, dtype=dtype)
    expected = (beta * bias if beta else torch.zeros(7, dtype=dtype)).expand(5, 7)
    assert torch.equal(Product(a, b, bias, alpha=0.0, beta=beta).run(), expected)


def test_alpha_zero_needs_no_partial_sums():
    a, b, bias = (matrix(*shape, dtype=torch.float16) for shape in ((5, 6), (6, 7), (7,)))
    result = Product(a, b, bias, alpha=0.0, partials="half").run()
    assert torch.equal(result, bias.expand(5, 7))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_products_are_summed_in_float32_and_rounded_once(dtype):
    """In the type itself 1 + 1 + ... stops growing at 2048 (float16) or 256 (bfloat16)."""
    ones = torch.ones(4, 8192, dtype=dtype)
    bias = torch.full((4,), 8192.0, dtype=dtype)
    result = Product(ones, ones.mT, bias).run()
    assert torch.equal(result, torch.full((4, 4), 16384.0, dtype=dtype))


@pytest.mark.parametrize(("m", "n"), [(16, 48), (14, 20), (64, 512), (65, 65)], ids=str)
@pytest.mark.parametrize("layout_b", [torch.Tensor.contiguous, transposed], ids=["b", "b.t"])
@pytest.mark.parametrize("layout_a", [torch.Tensor.contiguous, transposed], ids=["a", "a.t"])
def test_long_sums_are_accurate(m, n, layout_a, layout_b):
    """As in the gradient of a weight. One running float32 sum is ten times further off."""
    a, b = layout_a(torch.rand(m, 50_000)), layout_b(torch.rand(50_000, n))
    bias = torch.rand(n)
    exact = a.double() @ b.double()
    torch.testing.assert_close(Product(a, b).run().double(), exact, rtol=1.5e-6, atol=0)
    ours = Product(a, b, bias).run().double()
    torch.testing.assert_close(ours, exact + bias.double(), rtol=1.5e-6, atol=0)


def test_half_overflow_is_infinite():
    large = torch.full((2, 2), 300.0, dtype=torch.float16)
    assert torch.equal(Product(large, large).run(), torch.full_like(large, torch.inf))


def test_nan_and_infinity_pass_through():
    a = torch.tensor([[torch.nan, 0.0], [torch.inf, 1.0], [1.0, 2.0]])
    result = Product(a, torch.eye(2)).run()
    torch.testing.assert_close(result, a @ torch.eye(2), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_integers(dtype):
    a = torch.randint(-9, 9, (5, 6), dtype=dtype)
    b = torch.randint(-9, 9, (6, 7), dtype=dtype)
    bias = torch.randint(-9, 9, (7,), dtype=dtype)
    assert torch.equal(Product(a, b, bias).run(), a @ b + bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_run_reads_the_operands_anew(dtype):
    a, b, bias = (matrix(*shape, dtype=dtype) for shape in [(50, 60), (60, 70), (50, 70)])
    product = Product(a, b, bias)
    first = product.run()
    for operand in (a, b, bias):
        operand.mul_(2)
    product.write_inputs()
    assert not torch.equal(product.run(), first)
    for operand in (a, b, bias):
        operand.div_(2)
    product.write_inputs()
    assert torch.equal(product.run(), first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_programs_on_several_threads(dtype):
    """Scratch memory belongs to the thread that runs, not to the program."""
    products = [
        Product(matrix(n, 50, dtype=dtype), transposed(matrix(50, 70, dtype=dtype)))
        for n in (20, 90, 200, 300)
    ]
    expected = [product.run() for product in products]
    with ThreadPoolExecutor(len(products)) as pool:
        for _ in range(20):
            results = pool.map(lambda product: product.run(), products)
            assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize(
    ("a", "b", "bias", "shape", "message"),
    [
        (matrix(5, 6), matrix(7, 8), None, (5, 8), "as many columns as b has rows"),
        (matrix(2, 5, 6), matrix(3, 6, 8), None, (2, 5, 8), "the batch sizes are equal"),
        (matrix(5, 6), matrix(6, 8).half(), None, (5, 8), "the same dtype"),
        (matrix(5, 6), matrix(6, 8), matrix(8).half(), (5, 8), "the dtype of the operands"),
        (matrix(5, 6), matrix(6, 8), matrix(5), (5, 8), "input 2 broadcasts"),
        (matrix(6), matrix(6, 8), None, (8,), "two or three axes"),
        (matrix(5, 6), matrix(6, 8), None, (8, 5), "its shape rule gives"),
    ],
)
def test_wrong_operands_are_refused(a, b, bias, shape, message):
    with pytest.raises(InternalError, match=message):
        Product(a, b, bias, shape=shape)
