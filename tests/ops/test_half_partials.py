"""Matrix products and convolutions with half partials, to the last bit."""

import pytest
import torch

from popsim_torch.errors import InternalError
from tests.ops import half_partials
from tests.ops.one_op import LAYOUTS, OneOp, run_op
from tests.ops.test_convolution import CASES, Case, Operands, Program

HALF = torch.float16


def numbers(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape)).to(HALF)


def product(a, b, bias=None, mask=None, **attributes) -> torch.Tensor:
    shape = torch.matmul(a.to("meta"), b.to("meta")).shape
    inputs = [a, b, bias, mask]
    return run_op("matmul", inputs, [(HALF, shape)], partials="half", **attributes)[0]


# Less than a pass, whole passes and a rest; rows and columns of one block, of several, and odd.
SIZES = [
    (1, 1, 1),
    (1, 16, 1),
    (3, 15, 5),
    (1, 784, 100),
    (100, 33, 1),
    (5, 1, 7),
    (17, 129, 65),
    (49, 64, 48),
    (64, 300, 130),
    (200, 48, 100),
]


@pytest.mark.parametrize("layout_b", LAYOUTS)
@pytest.mark.parametrize("layout_a", LAYOUTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products(size, layout_a, layout_b):
    m, k, n = size
    a, b = numbers(m, k), numbers(k, n)
    ours = product(LAYOUTS[layout_a](a), LAYOUTS[layout_b](b))
    assert torch.equal(ours, half_partials.product(a, b))


@pytest.mark.parametrize("layout_b", LAYOUTS)
@pytest.mark.parametrize("layout_a", LAYOUTS)
@pytest.mark.parametrize(
    ("shape_a", "shape_b"),
    [
        ((3, 13, 37), (3, 37, 21)),
        ((4, 5, 40), (40, 7)),
        ((5, 40), (4, 40, 7)),
        ((1, 60, 17), (3, 17, 70)),
    ],
    ids=str,
)
def test_batches(shape_a, shape_b, layout_a, layout_b):
    a, b = numbers(*shape_a), numbers(*shape_b)
    ours = product(LAYOUTS[layout_a](a), LAYOUTS[layout_b](b))
    assert torch.equal(ours, half_partials.product(a, b))


def test_expanded_operands():
    a, b = numbers(1, 20, 30), numbers(1, 30, 40)
    expected = half_partials.product(a, b).expand(3, -1, -1)
    assert torch.equal(product(a.expand(3, -1, -1), b.expand(3, -1, -1)), expected)


def test_a_transposed_batch_of_rows_between():
    a, b = numbers(13, 3, 37).transpose(0, 1), numbers(21, 37, 3).permute(2, 1, 0)
    assert torch.equal(product(a, b), half_partials.product(a, b))


@pytest.mark.parametrize("bias_shape", [(7,), (1,), (), (5, 1), (5, 7), (4, 1, 1)], ids=str)
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.5, 1.0), (1.0, -2.0), (3.0, 0.25)])
def test_bias_alpha_and_beta_follow_the_sum_in_float32(bias_shape, alpha, beta):
    a, b, bias = numbers(4, 5, 40), numbers(40, 7), numbers(*bias_shape)
    exact = alpha * half_partials.product(a, b).double() + beta * bias.double()
    ours = product(a, b, bias, alpha=alpha, beta=beta)
    assert torch.equal(ours, exact.float().half())


def test_a_bias_with_beta_zero_is_not_read():
    a, b = numbers(5, 40), numbers(40, 7)
    ours = product(a, b, torch.full((7,), torch.nan, dtype=HALF), beta=0.0)
    assert torch.equal(ours, half_partials.product(a, b))


@pytest.mark.parametrize("size", [(5, 40, 7), (70, 40, 90)], ids=str)
def test_relu_and_mask_follow_the_sum(size):
    m, k, n = size
    a, b = numbers(m, k), numbers(k, n)
    a[0, 0] = torch.nan
    mask = numbers(m, n)
    expected = half_partials.product(a, b)
    relu = torch.where(expected < 0, 0, expected)
    assert torch.equal(product(a, b, activation="relu").isnan(), relu.isnan())
    assert torch.equal(product(a, b, activation="relu").nan_to_num(), relu.nan_to_num())
    masked = torch.where(mask <= 0, 0, expected).nan_to_num()
    assert torch.equal(product(a, b, None, mask).nan_to_num(), masked)


def test_ones_stop_growing_where_float16_does():
    """From 32768 on, float16 numbers are 32 apart: adding a pass of 16 ones gives 32768 again."""
    ones = torch.ones(2, 65536, dtype=HALF)
    ours = product(ones, ones.mT)
    assert torch.equal(ours, torch.full((2, 2), 32768.0, dtype=HALF))


def test_a_partial_sum_that_overflows_stays_infinite():
    """The sum itself would fit: 65536 - 65536."""
    a = torch.full((1, 64), 64.0, dtype=HALF)
    b = torch.full((64, 1), 64.0, dtype=HALF)
    b[32:] *= -1
    assert product(a, b).item() == torch.inf
    exact = run_op("matmul", [a, b], [(HALF, (1, 1))])[0]
    assert exact.item() == 0.0


def test_opposite_infinities_give_nan():
    a = torch.tensor([[torch.inf] * 2 + [1.0] * 30], dtype=HALF)
    b = torch.ones(32, 1, dtype=HALF)
    b[1] = -1
    assert product(a, b).isnan().all()


@pytest.mark.parametrize(("m", "k", "n"), [(5, 0, 7), (0, 6, 7), (5, 6, 0)])
def test_empty_operands(m, k, n):
    ours = product(torch.zeros(m, k, dtype=HALF), torch.zeros(k, n, dtype=HALF))
    assert torch.equal(ours, torch.zeros(m, n, dtype=HALF))


def test_the_threads_change_no_bit():
    a, b = numbers(300, 500), numbers(500, 400)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(product(a, b))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_every_run_reads_the_operands_anew():
    a, b = numbers(20, 50), numbers(50, 30)
    op = OneOp("matmul", [a, b], [(HALF, (20, 30))], {"partials": "half"})
    first = op.run()[0]
    for base, memory in op.memory:
        op._executable.write(base.id, memory * 2)
    assert torch.equal(op.run()[0], 4 * first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_half_partials_are_for_float16(dtype):
    a = torch.ones(3, 3, dtype=dtype)
    with pytest.raises(InternalError, match="half partials are for float16 operands"):
        run_op("matmul", [a, a], [(dtype, (3, 3))], partials="half")


def test_other_partials_are_refused():
    a = torch.ones(3, 3, dtype=HALF)
    with pytest.raises(InternalError, match="attribute 'partials' allows 'float'"):
        run_op("matmul", [a, a], [(HALF, (3, 3))], partials="float")


class HalfOperands(Operands):
    """Values for a convolution, and what the slow reference makes of them."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, HALF)
        num_axes = len(case.x) - 2
        lists = (case.stride, case.padding, case.dilation)
        stride, padding, dilation = (v * num_axes if len(v) == 1 else v for v in lists)
        self.reference = half_partials.Convolution(stride, padding, dilation, case.groups)
        self.attributes = {**case.attributes(), "partials": "half"}

    def expected_y(self) -> torch.Tensor:
        compute = self.reference.grad_input if self.case.transposed else self.reference.forward
        return compute(self.x, self.weight, self.y.shape[2:])

    def expected_grad_x(self) -> torch.Tensor:
        compute = self.reference.forward if self.case.transposed else self.reference.grad_input
        return compute(self.grad_y, self.weight, self.x.shape[2:])

    def expected_grad_weight(self) -> torch.Tensor:
        output, image = (self.grad_y, self.x) if not self.case.transposed else (self.x, self.grad_y)
        return self.reference.grad_weight(output, image, self.weight.shape)

    def run_forward(self, *, bias: bool) -> torch.Tensor:
        inputs = [self.x, self.weight, self.bias] if bias else [self.x, self.weight]
        return Program("convolution", inputs, [self.y.shape], self.attributes).run()[0]

    def run_grad_x(self) -> torch.Tensor:
        attributes = {**self.attributes, "input_shape": list(self.case.x)}
        inputs = [self.grad_y, self.weight]
        return Program("convolution_grad_input", inputs, [self.case.x], attributes).run()[0]

    def run_grad_weight(self) -> torch.Tensor:
        attributes = {**self.attributes, "weight_shape": list(self.case.weight)}
        inputs = [self.grad_y, self.x]
        return Program("convolution_grad_weight", inputs, [self.case.weight], attributes).run()[0]


@pytest.mark.parametrize("name", CASES)
def test_convolution(name):
    operands = HalfOperands(CASES[name])
    expected = operands.expected_y()
    assert torch.equal(operands.run_forward(bias=False), expected)
    per_channel = operands.bias.reshape(-1, *[1] * (expected.dim() - 2))
    # torch adds two float16 numbers in float32, too.
    assert torch.equal(operands.run_forward(bias=True), expected + per_channel)


@pytest.mark.parametrize("name", CASES)
def test_gradient_of_a_convolutions_input(name):
    operands = HalfOperands(CASES[name])
    assert torch.equal(operands.run_grad_x(), operands.expected_grad_x())


@pytest.mark.parametrize("name", CASES)
def test_gradient_of_a_convolutions_weight(name):
    operands = HalfOperands(CASES[name])
    assert torch.equal(operands.run_grad_weight(), operands.expected_grad_weight())


@pytest.mark.parametrize("name", ["2d_odd_channels", "2d_groups", "transposed_2d_all_options"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_convolution_operands(name, layout):
    operands = HalfOperands(CASES[name])
    expected = [operands.expected_y(), operands.expected_grad_x(), operands.expected_grad_weight()]
    for operand in ("x", "weight", "grad_y"):
        setattr(operands, operand, LAYOUTS[layout](getattr(operands, operand)))
    ours = [operands.run_forward(bias=False), operands.run_grad_x(), operands.run_grad_weight()]
    assert all(map(torch.equal, ours, expected))


def test_a_channel_at_a_time_is_rounded_at_each_position_of_the_kernel():
    x = torch.ones(1, 1, 64, 64, dtype=HALF)  # 2048 + 1 is 2048 in float16
    case = Case(x.shape, x.shape)
    attributes = {**case.attributes(), "partials": "half"}
    y = Program("convolution", [x, x], [(1, 1, 1, 1)], attributes).run()[0]
    assert y.item() == 2048.0


def test_no_images():
    case = Case((0, 3, 8, 8), (4, 3, 3, 3))
    x, weight = torch.zeros(case.x, dtype=HALF), numbers(*case.weight)
    attributes = {**case.attributes(), "partials": "half"}
    y = Program("convolution", [x, weight], [(0, 4, 6, 6)], attributes).run()[0]
    assert y.shape == (0, 4, 6, 6)
    attributes.update(weight_shape=list(case.weight))
    gradients = Program("convolution_grad_weight", [y, x], [case.weight], attributes).run()
    assert not gradients[0].any()


def test_convolutions_with_half_partials_are_for_float16():
    case = CASES["2d"]
    x, weight = torch.ones(case.x), torch.ones(case.weight)
    with pytest.raises(InternalError, match="half partials are for float16 operands"):
        Program(
            "convolution", [x, weight], [(3, 7, 7, 10)], {**case.attributes(), "partials": "half"}
        )
