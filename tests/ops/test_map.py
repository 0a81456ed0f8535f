"""The map op, run on the device, against eager PyTorch."""

import math
from collections.abc import Sequence

import pytest
import torch

from popsim_torch import _native, ir
from popsim_torch.errors import InternalError
from popsim_torch.passes.native_graph import to_native

Tensors = Sequence[torch.Tensor]


class Program:
    """A graph with one map op in it; its tensors are variables that a test writes and reads."""

    def __init__(self) -> None:
        self.graph = ir.Graph()
        self._values: list[tuple[ir.Tensor, torch.Tensor]] = []

    def variable(self, value: torch.Tensor) -> ir.Tensor:
        """Add a tensor with the values and the strides of ``value``."""
        storage = value.untyped_storage()
        count = storage.nbytes() // value.element_size()
        memory = value.as_strided((count,), (1,), 0)
        base = self.graph.add_tensor(ir.TensorKind.VARIABLE, value.dtype, (count,))
        self._values.append((base, memory))
        return self.graph.add_view(base, value.shape, value.stride(), value.storage_offset())

    def output(self, dtype: torch.dtype, shape: Sequence[int]) -> ir.Tensor:
        return self.graph.add_tensor(ir.TensorKind.VARIABLE, dtype, shape)

    def map(self, inputs, outputs, code, constants=(), results=(-1,)) -> None:
        """Add the op; negative results count from the last value."""
        num_values = len(inputs) + len(constants) + len(code)
        attributes = {
            "code": list(code),
            "constants": [float(constant) for constant in constants],
            "results": [result % num_values for result in results],
            "dtypes": [str(out.dtype).removeprefix("torch.") for out in outputs],
            "shape": list(outputs[0].shape),
        }
        self.graph.add_op("map", inputs, outputs, attributes, phase=ir.Phase.FORWARD, name="chain")

    def run(self, outputs: Sequence[ir.Tensor]) -> list[torch.Tensor]:
        config = _native.RunConfig(1, 1, False, "sequential")
        with _native.translated_errors():
            executable = _native.Executable(to_native(self.graph), config)
            for base, memory in self._values:
                executable.write(base.id, memory)
            executable.load()
            executable.run([])
        return [executable.read(out.id) for out in outputs]


def run_map(
    inputs: Tensors, code, constants=(), results=(-1,), dtypes=(torch.float32,), shape=None
):
    """Return the outputs of a program that is one map op."""
    program = Program()
    if shape is None:
        shape = torch.broadcast_shapes(*(x.shape for x in inputs))
    variables = [program.variable(x) for x in inputs]
    outputs = [program.output(dtype, shape) for dtype in dtypes]
    program.map(variables, outputs, code, constants, results)
    return program.run(outputs)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    if actual.dtype.is_floating_point:
        zero = actual == 0
        assert torch.equal(actual[zero].signbit(), expected[zero].signbit())


SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, 0.5, 1.5, 2.5, -0.5, 88.0, 1e30, 1.0]


def specimen(seed: int, numel: int = 1024) -> torch.Tensor:
    """Normal numbers with special ones in between; no rest after the last vector."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * 3
    special = torch.tensor(SPECIAL)
    x[seed::31][: len(special)] = special
    return x


X, Y, Z = specimen(1), specimen(2), specimen(3)

# Instruction, arguments, what PyTorch computes.
EXACT = [
    ("abs", (X,), X.abs()),
    ("add", (X, Y), X + Y),
    ("and", (X, Y), X.logical_and(Y)),
    ("bfloat16", (X,), X.bfloat16()),
    ("ceil", (X,), X.ceil()),
    ("clamp", (X, -1.0, 1.5), X.clamp(-1.0, 1.5)),
    ("clamp", (X, 0.0, 6.0), X.clamp(0.0, 6.0)),
    ("clamp", (X, math.nan, 6.0), X.clamp(math.nan, 6.0)),
    ("clamp", (X, Y, Z), X.clamp(Y, Z)),
    ("copy", (X,), X),
    ("div", (X, Y), X / Y),
    ("div", (X, 3.0), X / 3.0),
    ("eq", (X, X.roll(1)), X.eq(X.roll(1))),
    ("floor", (X,), X.floor()),
    ("ge", (X, Y), X >= Y),
    ("gt", (X, Y), X > Y),
    ("half", (X,), X.half()),
    ("le", (X, Y), X <= Y),
    ("leaky_relu", (X, 0.01), torch.nn.functional.leaky_relu(X, 0.01)),
    ("lt", (X, Y), X < Y),
    ("max", (X, Y), X.maximum(Y)),
    ("min", (X, Y), X.minimum(Y)),
    ("mul", (X, Y), X * Y),
    ("mul", (2.5, Y), 2.5 * Y),
    ("ne", (X, Y), X != Y),
    ("neg", (X,), -X),
    ("not", (X,), X.logical_not()),
    ("or", (X, Y), X.logical_or(Y)),
    ("pow", (X, 2.0), X**2),
    ("pow", (X, 3.0), X**3),
    ("pow", (X, 1.0), X**1),
    ("pow", (X, 0.0), X**0),
    ("pow", (X, -0.5), X**-0.5),
    ("pow", (X, -1.0), X**-1),
    ("pow", (X, -2.0), X**-2),
    ("reciprocal", (X,), X.reciprocal()),
    ("relu", (X,), X.relu()),
    ("round", (X,), X.round()),
    ("rsqrt", (X,), X.rsqrt()),
    ("sign", (X,), X.sign()),
    ("square", (X,), X.square()),
    ("sub", (X, Y), X - Y),
    ("sub", (1.0, Y), 1.0 - Y),
    ("trunc", (X,), X.trunc()),
    ("where", (X > 0, X, Y), torch.where(X > 0, X, Y)),
    ("where", (X > 0, 0.0, Y), torch.where(X > 0, 0.0, Y)),
]
# PyTorch may take these from another library, or from a vector unit of another width.
CLOSE = [
    ("cos", (X,), X.cos()),
    ("erf", (X,), X.erf()),
    ("exp", (X,), X.exp()),
    ("expm1", (X,), X.expm1()),
    ("inverse_square", (X,), X**-2),
    ("cube", (X,), X**3),
    ("clamp_to_numbers", (X, -1.0, 1.5), X.clamp(-1.0, 1.5)),
    ("log", (X,), X.log()),
    ("log1p", (X,), X.log1p()),
    ("log2", (X,), X.log2()),
    ("pow", (X, Y), X**Y),
    ("pow", (X, 0.5), X**0.5),
    ("pow", (X, 1.7), X**1.7),
    ("sigmoid", (X,), X.sigmoid()),
    ("sin", (X,), X.sin()),
    ("sqrt", (X,), X.sqrt()),
    ("tanh", (X,), X.tanh()),
]


def run_instruction(name, arguments, dtype=torch.float32):
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    numbers = [a for a in arguments if not isinstance(a, torch.Tensor)]
    positions = {id(a): i for i, a in enumerate([*tensors, *numbers])}
    line = " ".join([name, *(str(positions[id(a)]) for a in arguments)])
    (out,) = run_map(tensors, [line], numbers, dtypes=[dtype])
    return out


def case_names(cases):
    return [
        f"{name}({', '.join(str(a) if isinstance(a, float) else 'x' for a in arguments)})"
        for name, arguments, _ in cases
    ]


@pytest.mark.parametrize(("name", "arguments", "expected"), EXACT, ids=case_names(EXACT))
def test_instruction_gives_the_bits_of_torch(name, arguments, expected):
    assert_same_bits(run_instruction(name, arguments), expected.float())


@pytest.mark.parametrize(("name", "arguments", "expected"), CLOSE, ids=case_names(CLOSE))
def test_instruction_agrees_with_torch_to_a_few_ulp(name, arguments, expected):
    actual = run_instruction(name, arguments)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-38, equal_nan=True)


def test_erf_is_accurate_near_zero_and_in_the_tails():
    x = torch.cat([torch.logspace(-38, 1, 2000), -torch.logspace(-38, 1, 2000)])
    (out,) = run_map([x], ["erf 0"])
    torch.testing.assert_close(out.double(), x.double().erf(), rtol=5e-7, atol=0)


@pytest.mark.parametrize("numel", [1, 2, 15, 17, 1023, 1024, 1025, 2500])
def test_a_value_does_not_depend_on_its_position(numel):
    x = specimen(4, 4096)[:numel]
    (whole,) = run_map([x], ["exp 0", "tanh 1", "sigmoid 2"])
    for start in range(min(numel, 20)):
        (part,) = run_map([x[start:].clone()], ["exp 0", "tanh 1", "sigmoid 2"])
        assert_same_bits(part, whole[start:])


FLOATS = [torch.float32, torch.float16, torch.bfloat16]
INPUT_TYPES = [*FLOATS, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def of_type(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return x > 0
    return (x.abs() * 20).to(dtype) if dtype == torch.uint8 else (x * 20).to(dtype)


@pytest.mark.parametrize("numel", [1, 31, 1000, 3001])
@pytest.mark.parametrize("dtype", INPUT_TYPES, ids=str)
def test_inputs_of_every_type(dtype, numel):
    x = of_type(torch.randn(numel), dtype)
    y = of_type(torch.randn(numel, 2), dtype)[:, 1]
    (out,) = run_map([x, y], ["add 0 1"])
    assert_same_bits(out, x.float() + y.float())


@pytest.mark.parametrize("numel", [1, 31, 1000, 3001])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.bool], ids=str)
def test_outputs_of_every_type(dtype, numel):
    x = torch.randn(numel) * 1000
    x[::3] = 0
    (out,) = run_map([x], ["copy 0"], dtypes=[dtype])
    assert_same_bits(out, x.to(dtype))
    (out,) = run_map([x], [], results=[0], dtypes=[dtype])
    assert_same_bits(out, x.to(dtype))


def test_a_fused_half_chain_has_the_bits_of_the_unfused_one():
    x, y = torch.randn(3, 700).half(), torch.randn(700).half()
    code = ["add 0 1", "half 2", "mul 3 0", "half 4", "sub 5 1", "half 6"]
    (out,) = run_map([x, y], code, dtypes=[torch.float16])
    assert_same_bits(out, (x + y) * x - y)


SHAPES = [(1, 1), (3, 7), (32, 10), (100, 5), (7, 320), (2, 1024), (3, 1025), (1000, 3), (2, 2500)]


def layouts(shape):
    """Tensors that broadcast to a matrix, in every layout that takes another path."""
    rows, columns = shape
    yield "contiguous", torch.randn(rows, columns)
    yield "row", torch.randn(columns)
    yield "column", torch.randn(rows, 1)
    yield "scalar", torch.randn(())
    yield "one element", torch.randn(1, 1)
    yield "transposed", torch.randn(columns, rows).t()
    yield "every other column", torch.randn(rows, 2 * columns)[:, ::2]
    yield "every other row", torch.randn(2 * rows, columns)[::2]
    yield "cropped", torch.randn(rows + 1, columns + 3)[1:, 2 : columns + 2]
    yield "expanded", torch.randn(rows, 1).expand(rows, columns)
    yield "expanded rows", torch.randn(columns).expand(rows, columns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matrices_in_every_layout(shape, dtype):
    x = torch.randn(shape)
    for layout, y in layouts(shape):
        y = of_type(y, dtype)
        expected = (x + y.float()).relu()
        actual = run_map([x, y], ["add 0 1", "relu 2"], results=[2, 3], dtypes=[torch.float32] * 2)
        torch.testing.assert_close(actual, [x + y.float(), expected], rtol=0, atol=0, msg=layout)
        (out,) = run_map([y, x], ["add 0 1", "relu 2"], dtypes=[torch.float16])
        torch.testing.assert_close(out, expected.half(), rtol=0, atol=0, msg=layout)


@pytest.mark.parametrize(
    "shape", [(4, 3, 5, 7), (2, 16, 14, 14), (3, 8, 1, 40), (2, 3, 33, 50), (3, 1, 7)], ids=str
)
def test_broadcasting_in_more_dimensions(shape):
    x = torch.randn(shape)
    others = [torch.randn([n if i == axis else 1 for i, n in enumerate(shape)]) for axis in (0, 1)]
    others += [torch.randn([1 if i == axis else n for i, n in enumerate(shape)]) for axis in (0, 1)]
    others += [torch.randn(shape[1:]), torch.randn(shape[::-1]).permute(*range(len(shape))[::-1])]
    for y in others:
        for operand in (y, y > 0):
            (out,) = run_map([x, operand], ["mul 0 1"])
            assert_same_bits(out, x * operand.float())


def test_both_inputs_broadcast():
    x, y = torch.randn(30, 1), torch.randn(1, 70)
    (out,) = run_map([x, y], ["sub 0 1"])
    assert_same_bits(out, x - y)


def test_values_that_are_one_number_per_row_or_per_run():
    x, variance, scale = torch.randn(5, 3000), torch.rand(5, 1), torch.rand(())
    code = ["add 1 2", "rsqrt 3", "mul 0 4", "exp 2"]
    out, row, run = run_map(
        [x, variance, scale],
        code,
        results=[5, 4, 6],
        dtypes=[torch.float32, torch.float32, torch.float16],
    )
    inverse = (variance + scale).rsqrt()
    assert_same_bits(out, x * inverse)
    assert_same_bits(row, inverse.expand_as(x))
    torch.testing.assert_close(run, scale.exp().half().expand_as(x), rtol=1e-3, atol=0)


def test_a_fill_needs_no_inputs():
    filled, flags = run_map(
        [], [], [2.5, 0.0], results=[0, 1], dtypes=[torch.float32, torch.bool], shape=(3, 7)
    )
    assert torch.equal(filled, torch.full((3, 7), 2.5))
    assert torch.equal(flags, torch.zeros(3, 7, dtype=torch.bool))


def test_one_result_for_two_outputs():
    x = torch.randn(2000)
    first, second = run_map([x], ["neg 0"], results=[1, 1], dtypes=[torch.float32, torch.float32])
    assert torch.equal(first, -x)
    assert torch.equal(second, -x)


def test_a_long_program_reuses_its_scratch_memory():
    x, y = torch.randn(64, 128), torch.randn(128)
    code = ["add 0 1"]
    expected = x + y
    for i in range(50):
        code.append(f"sub {3 + i} 0" if i % 2 else f"mul {3 + i} 2")
        expected = expected - x if i % 2 else expected * 0.5
    (out,) = run_map([x, y], code, [0.5])
    assert_same_bits(out, expected)


def test_a_program_on_several_threads():
    x, y = torch.randn(2000, 700), torch.randn(700)
    out, flags = run_map(
        [x, y], ["add 0 1", "relu 2", "gt 0 1"], results=[3, 4], dtypes=[torch.float32, torch.bool]
    )
    assert_same_bits(out, (x + y).relu())
    assert torch.equal(flags, x > y)


ALIAS_SIZES = [1, 15, 1000, 5000, 300000]


@pytest.mark.parametrize("numel", ALIAS_SIZES)
def test_an_output_over_an_input_that_is_read_again(numel):
    x, y = torch.randn(numel), torch.randn(numel)
    program = Program()
    a, b = program.variable(x), program.variable(y)
    product = program.output(torch.float32, (numel,))
    over_a = program.graph.add_view(a, a.shape, a.strides, 0)
    program.map([a, b], [over_a, product], ["add 0 1", "mul 2 0"], results=[2, 3])
    first, second = program.run([over_a, product])
    assert_same_bits(first, x + y)
    assert_same_bits(second, (x + y) * x)


@pytest.mark.parametrize("numel", ALIAS_SIZES)
def test_outputs_over_each_others_inputs(numel):
    x, y = torch.randn(numel), torch.randn(numel)
    program = Program()
    a, b = program.variable(x), program.variable(y)
    over = [program.graph.add_view(t, t.shape, t.strides, 0) for t in (a, b)]
    program.map([a, b], over, [], results=[1, 0])
    first, second = program.run(over)
    assert torch.equal(first, y)
    assert torch.equal(second, x)


@pytest.mark.parametrize("numel", ALIAS_SIZES)
def test_a_half_output_over_a_half_input(numel):
    x, y = torch.randn(numel).half(), torch.randn(numel)
    program = Program()
    a, b = program.variable(x), program.variable(y)
    over = program.graph.add_view(a, a.shape, a.strides, 0)
    program.map([a, b], [over], ["add 0 1", "mul 2 0"])
    (out,) = program.run([over])
    assert_same_bits(out, ((x + y) * x).half())


def test_memory_of_a_dying_input_is_reused():
    x = torch.randn(3000)
    program = Program()
    a = program.variable(x)
    chain = [a]
    for _ in range(4):
        chain.append(program.graph.add_tensor(ir.TensorKind.VALUE, torch.float32, (3000,)))
        program.map([chain[-2]], [chain[-1]], ["add 0 1"], [1.0])
    out = program.output(torch.float32, (3000,))
    program.map([chain[-1]], [out], ["copy 0"])
    (result,) = program.run([out])
    assert_same_bits(result, x + 1 + 1 + 1 + 1)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (["frobnicate 0 1"], "instruction 0 'frobnicate 0 1': unknown instruction"),
        (["add 0"], "instruction 0 'add 0': expected 2 operands, got 1"),
        (["add 0 1", "neg 0 1"], "instruction 1 'neg 0 1': expected 1 operands, got 2"),
        (["add 0 3"], "instruction 0 'add 0 3': operand 3 is not defined yet"),
        (["add 0 2"], "instruction 0 'add 0 2': operand 2 is not defined yet"),
        (["add 0 x"], "instruction 0 'add 0 x': operand 'x' is not a value number"),
        (["add 0 -1"], "instruction 0 'add 0 -1': operand '-1' is not a value number"),
        ([""], "instruction 0 '': unknown instruction"),
    ],
)
def test_bad_code_names_the_op_and_the_instruction(code, problem):
    with pytest.raises(InternalError) as error:
        run_map([torch.zeros(3), torch.zeros(3)], code, results=[0])
    assert f"map 'chain': {problem}" in str(error.value)


def test_a_result_that_is_no_value_is_refused():
    program = Program()
    out = program.output(torch.float32, (3,))
    attributes = {
        "code": [],
        "constants": [1.0],
        "results": [1],
        "dtypes": ["float32"],
        "shape": [3],
    }
    program.graph.add_op("map", [], [out], attributes, phase=ir.Phase.FORWARD, name="chain")
    with pytest.raises(InternalError, match="map 'chain': result 1"):
        program.run([out])


def test_inputs_that_do_not_broadcast_are_refused():
    with pytest.raises(InternalError, match=r"input 0 broadcasts to \(3\), got \(float32\(4\)\)"):
        run_map([torch.zeros(4)], ["neg 0"], shape=(3,))
