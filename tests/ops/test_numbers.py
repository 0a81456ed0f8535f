"""The op for single numbers, run on the device, against Python's own arithmetic."""

import math

import pytest
import torch

from popsim_torch import _native, ir
from popsim_torch.errors import InternalError
from popsim_torch.passes.native_graph import to_native
from popsim_torch.reference.elementwise import INSTRUCTIONS

UNARY = {
    "abs": abs,
    "ceil": math.ceil,
    "cos": math.cos,
    "erf": math.erf,
    "exp": math.exp,
    "expm1": math.expm1,
    "floor": math.floor,
    "log1p": lambda x: math.log1p(x) if x > -1 else math.nan,
    "neg": lambda x: -x,
    "not": lambda x: x == 0,
    "reciprocal": lambda x: 1 / x,
    "relu": lambda x: max(x, 0),
    "round": round,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "sign": lambda x: math.copysign(1, x),
    "sin": math.sin,
    "square": lambda x: x * x,
    "tanh": math.tanh,
    "trunc": math.trunc,
}
BINARY = {
    "add": lambda a, b: a + b,
    "and": lambda a, b: a != 0 and b != 0,
    "div": lambda a, b: a / b,
    "eq": lambda a, b: a == b,
    "ge": lambda a, b: a >= b,
    "gt": lambda a, b: a > b,
    "le": lambda a, b: a <= b,
    "lt": lambda a, b: a < b,
    "max": max,
    "min": min,
    "mul": lambda a, b: a * b,
    "ne": lambda a, b: a != b,
    "or": lambda a, b: a != 0 or b != 0,
    "pow": lambda a, b: abs(a) ** b,
    "sub": lambda a, b: a - b,
}


def run(inputs, code, constants=(), results=(-1,), dtypes=("float64",), shape=()):
    """Return some values of the code; negative results count from the last one."""
    graph = ir.Graph()
    variables = [
        graph.add_tensor(ir.TensorKind.VARIABLE, value.dtype, value.shape) for value in inputs
    ]
    outputs = [
        graph.add_tensor(ir.TensorKind.VARIABLE, getattr(torch, dtype), shape) for dtype in dtypes
    ]
    count = len(inputs) + len(constants) + len(code)
    attributes = {
        "code": list(code),
        "constants": list(map(float, constants)),
        "results": [result % count for result in results],
        "dtypes": list(dtypes),
    }
    graph.add_op("numbers", variables, outputs, attributes, phase=ir.Phase.FORWARD, name="n")
    config = _native.RunConfig(1, 1, False, "sequential")
    with _native.translated_errors():
        executable = _native.Executable(to_native(graph), config)
        for variable, value in zip(variables, inputs, strict=True):
            executable.write(variable.id, value)
        executable.load()
        executable.run([])
    return [executable.read(out.id) for out in outputs]


def number(value, dtype=torch.float64):
    return torch.tensor(value, dtype=dtype)


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("value", [-1.7, 0.3, 2.5])
def test_one_operand(name, value):
    (result,) = run([number(value)], [f"{name} 0"])
    expected = float(UNARY[name](value))
    torch.testing.assert_close(result, number(expected), rtol=1e-15, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["log", "log2", "sqrt", "rsqrt"])
def test_one_positive_operand(name):
    (result,) = run([number(2.7)], [f"{name} 0"])
    expected = INSTRUCTIONS[name](number(2.7))
    torch.testing.assert_close(result, expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("pair", [(1.5, -0.25), (2.0, 2.0), (0.0, 3.0)])
def test_two_operands(name, pair):
    a, b = abs(pair[0]) if name == "pow" else pair[0], pair[1]
    (result,) = run([number(a), number(b)], [f"{name} 0 1"])
    assert result.item() == float(BINARY[name](a, b))


def test_three_operands():
    chosen, clamped = run(
        [number(1.0), number(5.0)],
        ["where 0 1 2", "clamp 1 3 2"],
        [2.0, -2.0],
        results=(-2, -1),
        dtypes=("float64", "float64"),
    )
    assert (chosen.item(), clamped.item()) == (5.0, 2.0)


def test_a_correction_of_adam_is_exact_in_float64():
    step, beta = number(3.0, torch.float32), number(0.999)
    (result,) = run([step, beta], ["pow 1 0", "sub 2 3"], [1.0])
    assert result.item() == 1.0 - 0.999**3


def test_float32_rounds_in_between():
    (result,) = run([number(0.1)], ["float32 0"])
    assert result.item() == number(0.1, torch.float32).item()


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.int32, torch.int64, torch.bool, torch.uint8]
)
def test_inputs_of_any_dtype(dtype):
    (result,) = run([torch.ones(1, dtype=dtype)], ["add 0 0"])
    assert result.item() == 2.0


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float32", 2.5), ("float16", 2.5), ("int64", 2), ("int32", 2), ("bool", True)],
)
def test_results_of_several_dtypes(dtype, expected):
    (result,) = run([number(2.5)], [], results=(0,), dtypes=(dtype,))
    assert result.item() == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_a_number_that_an_integer_cannot_hold(value):
    (result,) = run([number(value)], [], results=(0,), dtypes=("int64",))
    assert result.item() == torch.iinfo(torch.int64).min


def test_nan_goes_through_maximum_and_minimum():
    results = run(
        [number(math.nan), number(1.0)],
        ["max 0 1", "max 1 0", "min 0 1", "min 1 0"],
        results=(-4, -3, -2, -1),
        dtypes=("float64",) * 4,
    )
    assert all(result.isnan() for result in results)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("tan 0", "is known"),
        ("add 0", "has 2 operands"),
        ("add 0 9", "reads 2 values before it"),
        ("add 0 x", "reads 2 values before it"),
        ("neg 0 0", "reads 1 values before it"),
    ],
)
def test_wrong_code_is_refused(code, text):
    with pytest.raises(InternalError, match=text):
        run([number(1.0)], [code])


def test_inputs_of_several_elements_are_refused():
    with pytest.raises(InternalError, match="input 0 is one number"):
        run([torch.ones(2)], ["neg 0"])
