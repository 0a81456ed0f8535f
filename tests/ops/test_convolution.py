"""The convolution ops, run on the device, against float64 eager PyTorch."""

from dataclasses import dataclass, field

import pytest
import torch

from popsim_torch import _native, ir
from popsim_torch.errors import InternalError
from popsim_torch.passes.native_graph import to_native

# Largest error as a share of the largest value.
TOLERANCES = {
    torch.float64: 1e-13,
    torch.float32: 1e-5,
    torch.float16: 6e-4,
    torch.bfloat16: 5e-3,
}
DTYPES = list(TOLERANCES)


@dataclass
class Case:
    """A convolution. One value in a list holds for all spatial axes."""

    x: tuple[int, ...]
    weight: tuple[int, ...]
    stride: list[int] = field(default_factory=lambda: [1])
    padding: list[int] = field(default_factory=lambda: [0])
    dilation: list[int] = field(default_factory=lambda: [1])
    output_padding: list[int] = field(default_factory=lambda: [0])
    transposed: bool = False
    groups: int = 1

    def attributes(self) -> dict:
        names = ("stride", "padding", "dilation", "output_padding", "transposed", "groups")
        return {name: getattr(self, name) for name in names}

    @property
    def channels(self) -> int:
        """How many the output has (count)."""
        return self.weight[1] * self.groups if self.transposed else self.weight[0]

    def eager(self, x, weight, bias) -> torch.Tensor:
        num_axes = len(self.x) - 2
        lists = [
            values * num_axes if len(values) == 1 else values
            for values in (self.stride, self.padding, self.dilation, self.output_padding)
        ]
        stride, padding, dilation, output_padding = lists
        return torch.convolution(
            x, weight, bias, stride, padding, dilation, self.transposed, output_padding, self.groups
        )


CASES = {
    "1d": Case((3, 5, 17), (7, 5, 3)),
    "1d_all_options": Case((2, 6, 30), (8, 3, 4), [2], [3], [2], groups=2),
    "1d_pointwise": Case((2, 6, 300), (9, 6, 1)),
    "2d": Case((3, 5, 9, 11), (7, 5, 3, 2)),
    "2d_blocks": Case((2, 32, 14, 14), (64, 32, 3, 3), padding=[1]),
    "2d_odd_channels": Case((2, 19, 12, 12), (33, 19, 5, 5), padding=[2]),
    "2d_stride": Case((2, 16, 15, 12), (32, 16, 3, 3), [2, 3], [1, 0]),
    "2d_dilation": Case((2, 16, 15, 12), (32, 16, 3, 3), dilation=[3, 2]),
    "2d_unused_border": Case((1, 3, 10, 10), (4, 3, 3, 3), [4]),
    "2d_images": Case((4, 1, 28, 28), (8, 1, 3, 3)),
    "2d_colours": Case((2, 3, 32, 32), (16, 3, 7, 7), [2], [3]),
    "2d_pointwise": Case((2, 32, 20, 20), (48, 32, 1, 1)),
    "2d_pointwise_small": Case((2, 32, 5, 5), (48, 32, 1, 1)),
    "2d_pointwise_stride": Case((2, 32, 20, 20), (48, 32, 1, 1), [2]),
    "2d_groups": Case((2, 12, 9, 9), (18, 4, 3, 3), groups=3),
    "2d_depthwise": Case((2, 24, 9, 9), (24, 1, 3, 3), padding=[1], groups=24),
    "2d_depthwise_twice": Case((2, 6, 9, 9), (12, 1, 3, 3), groups=6),
    "2d_whole_image": Case((4, 6, 5, 7), (9, 6, 5, 7)),
    "3d": Case((2, 3, 6, 7, 8), (5, 3, 2, 3, 1), [1, 2, 1], [1, 0, 0], [2, 1, 1]),
    "3d_groups": Case((1, 4, 5, 5, 5), (6, 2, 3, 3, 3), groups=2),
    "transposed_1d": Case((2, 4, 9), (4, 6, 4), [2], [1], transposed=True),
    "transposed_2d": Case((2, 16, 7, 7), (16, 8, 4, 4), [2], [1], transposed=True),
    "transposed_2d_all_options": Case(
        (2, 6, 5, 6), (6, 5, 3, 2), [3, 2], [1, 2], [2, 3], [2, 1], transposed=True, groups=2
    ),
    # The padding of the convolution it is the gradient of differs at the two ends.
    "transposed_2d_wide_output_padding": Case(
        (2, 3, 5, 5), (3, 4, 3, 3), [1], [0], [3], [2], transposed=True
    ),
    "transposed_3d": Case((1, 3, 3, 4, 3), (3, 2, 3, 2, 3), [2], transposed=True),
    # Large enough to be cut: in rows of an image, images, channels of the output.
    "cut_rows": Case((1, 32, 67, 40), (48, 32, 3, 3), padding=[1]),
    "cut_rows_stride": Case((1, 32, 90, 60), (64, 32, 3, 3), [4, 1], [2, 1]),
    "cut_rows_dilation": Case((2, 32, 41, 50), (32, 32, 3, 2), [2], [4], [3]),
    "cut_rows_much_padding": Case((1, 32, 22, 70), (64, 32, 3, 3), [1], [9, 1]),
    "cut_line": Case((1, 64, 3000), (64, 64, 7), padding=[3]),
    "cut_images": Case((5, 32, 30, 30), (64, 32, 3, 3)),
    "cut_channels": Case((2, 64, 12, 12), (256, 64, 3, 3)),
    "cut_transposed": Case((3, 64, 20, 20), (64, 48, 4, 4), [2], [1], transposed=True),
}


class Program:
    """One op on tensors that keep their values and strides."""

    def __init__(self, kind: str, inputs, shapes, attributes: dict) -> None:
        self._graph = ir.Graph()
        self._memory: list[tuple[ir.Tensor, torch.Tensor]] = []
        variables = [self._variable(value) for value in inputs]
        self._outputs = [
            self._graph.add_tensor(ir.TensorKind.VARIABLE, inputs[0].dtype, shape)
            for shape in shapes
        ]
        self._graph.add_op(
            kind, variables, self._outputs, attributes, phase=ir.Phase.FORWARD, name="conv"
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

    def run(self) -> list[torch.Tensor]:
        with _native.translated_errors():
            self._executable.run([])
        return [self._executable.read(out.id) for out in self._outputs]


class Operands:
    """Values for a case, and what eager PyTorch makes of them in float64."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case = case
        self.x = random(case.x, dtype)
        self.weight = random(case.weight, dtype)
        self.bias = random((case.channels,), dtype)
        values = (self.x, self.weight)
        leaves = [value.to(torch.float64, copy=True).requires_grad_() for value in values]
        y = case.eager(*leaves, self.bias.double())
        self.y = y.detach()
        self.grad_y = random(y.shape, dtype)
        self.grad_x, self.grad_weight = torch.autograd.grad(y, leaves, self.grad_y.double())

    def forward(self, bias: bool = True) -> torch.Tensor:
        inputs = [self.x, self.weight, self.bias] if bias else [self.x, self.weight]
        return Program("convolution", inputs, [self.y.shape], self.case.attributes()).run()[0]

    def backward_of_x(self) -> torch.Tensor:
        attributes = {**self.case.attributes(), "input_shape": list(self.case.x)}
        inputs = [self.grad_y, self.weight]
        return Program("convolution_grad_input", inputs, [self.case.x], attributes).run()[0]

    def backward_of_weight(self) -> torch.Tensor:
        attributes = {**self.case.attributes(), "weight_shape": list(self.case.weight)}
        inputs = [self.grad_y, self.x]
        return Program("convolution_grad_weight", inputs, [self.case.weight], attributes).run()[0]


def random(shape, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tuple(shape), dtype=torch.float64).to(dtype)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    # Sums of many terms of size one may cancel.
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=TOLERANCES[dtype] * scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_forward(name, dtype):
    operands = Operands(CASES[name], dtype)
    assert_near(operands.forward(), operands.y, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["2d", "2d_pointwise", "transposed_2d"])
def test_forward_without_bias(name, dtype):
    operands = Operands(CASES[name], dtype)
    per_channel = operands.bias.double()[:, None, None]
    assert_near(operands.forward(bias=False), operands.y - per_channel, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradient_of_the_input(name, dtype):
    operands = Operands(CASES[name], dtype)
    assert_near(operands.backward_of_x(), operands.grad_x, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradient_of_the_weight(name, dtype):
    operands = Operands(CASES[name], dtype)
    assert_near(operands.backward_of_weight(), operands.grad_weight, dtype)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def inside_a_larger_image(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x, (1, 2, 3, 4), value=torch.nan)[..., 3:-4, 1:-2]


def same_for_all(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand_as(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["2d_blocks", "2d_pointwise", "transposed_2d"])
@pytest.mark.parametrize(
    "layout", [channels_last, inside_a_larger_image, same_for_all], ids=lambda f: f.__name__
)
def test_layouts(layout, name, dtype):
    operands = Operands(CASES[name], dtype)
    names = ("x", "weight", "grad_y")

    def results():
        return [operands.forward(), operands.backward_of_x(), operands.backward_of_weight()]

    for operand in names:
        setattr(operands, operand, layout(getattr(operands, operand)))
    actual = results()
    for operand in names:
        setattr(operands, operand, getattr(operands, operand).contiguous())
    expected = results()
    for one, other in zip(actual, expected, strict=True):
        assert_near(one, other.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_images(dtype):
    case = Case((0, 3, 8, 8), (4, 3, 3, 3))
    x, weight = torch.zeros(case.x, dtype=dtype), random(case.weight, dtype)
    y = Program("convolution", [x, weight], [(0, 4, 6, 6)], case.attributes()).run()[0]
    assert y.shape == (0, 4, 6, 6)
    attributes = {**case.attributes(), "weight_shape": list(case.weight)}
    gradients = Program("convolution_grad_weight", [y, x], [case.weight], attributes).run()
    assert not gradients[0].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_products_are_summed_in_float32_and_rounded_once(dtype):
    """In the type itself 1 + 1 + ... stops growing at 2048 (float16) or 256 (bfloat16)."""
    x = torch.ones(1, 512, 4, 4, dtype=dtype)
    y = Program("convolution", [x, x], [(1, 1, 1, 1)], Case(x.shape, x.shape).attributes()).run()[0]
    assert y.item() == 8192.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_run_reads_the_operands_anew(dtype):
    case = CASES["2d_blocks"]
    x, weight = random(case.x, dtype), random(case.weight, dtype)
    program = Program("convolution", [x, weight], [(2, 64, 14, 14)], case.attributes())
    first = program.run()[0]
    weight.mul_(2)
    program.write_inputs()
    assert torch.equal(program.run()[0], 2 * first)
    x.mul_(0.5)
    program.write_inputs()
    assert torch.equal(program.run()[0], first)


@pytest.mark.parametrize(
    ("case", "shape", "message"),
    [
        (Case((1, 4, 8, 8), (6, 3, 3, 3)), (1, 6, 6, 6), "channels that the weight expects"),
        (Case((1, 4, 8, 8), (6, 4, 9, 9)), (1, 6, 0, 0), "the kernel fits"),
        (Case((1, 4, 8, 8), (6, 4, 3)), (1, 6, 6, 6), "same number of axes, at least three"),
        (Case((1, 4, 8, 8), (5, 2, 3, 3), groups=2), (1, 5, 6, 6), "the groups divide"),
        (Case((1, 4, 8, 8), (6, 4, 3, 3), [1, 1, 1]), (1, 6, 6, 6), "stride has 3 values for 2"),
        (Case((1, 4, 8, 8), (6, 4, 3, 3)), (1, 6, 6, 5), "its shape rule gives"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_operands_are_refused(case, shape, message):
    operands = [torch.zeros(case.x), torch.zeros(case.weight)]
    with pytest.raises(InternalError, match=message):
        Program("convolution", operands, [shape], case.attributes())


def test_wrong_gradients_are_refused():
    case = CASES["2d_blocks"]
    grad_y, weight = torch.zeros(2, 64, 13, 14), torch.zeros(case.weight)
    attributes = {**case.attributes(), "input_shape": list(case.x)}
    with pytest.raises(InternalError, match="of the convolution's output"):
        Program("convolution_grad_input", [grad_y, weight], [case.x], attributes)
