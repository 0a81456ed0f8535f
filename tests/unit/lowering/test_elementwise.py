"""Elementwise operators as ``map`` programs: every rule against PyTorch, in float and half."""

import math

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.lowering.rules.elementwise import RULES

aten = torch.ops.aten

# The arguments of each operator of the table after its first tensor. Names in angle brackets are
# tensors: <y> any values, <p> positive ones, <m> a mask, <n> small integers (as floats).
Y, P, M, N = "<y>", "<p>", "<m>", "<n>"
BEHIND = {
    aten._to_copy.default: [((), {"dtype": torch.float16}), ((), {"dtype": torch.float32})],
    aten.add.Scalar: [((2.5,), {}), ((2.5, 3), {})],
    aten.add.Tensor: [((Y,), {}), ((Y,), {"alpha": -0.5})],
    aten.addcdiv.default: [((Y, P), {}), ((Y, P), {"value": 0.25})],
    aten.addcmul.default: [((Y, P), {}), ((Y, P), {"value": 0.25})],
    aten.clamp.default: [((-0.5,), {}), ((-0.5, 0.5), {}), ((None, 0.25), {}), ((0.5, -0.5), {})],
    aten.clamp_max.default: [((0.5,), {})],
    aten.clamp_min.default: [((-0.5,), {})],
    aten.copy.default: [((Y,), {})],
    aten.div.Scalar: [((3.0,), {})],
    aten.div.Tensor: [((P,), {})],
    aten.expand_copy.default: [(((2, 3, 5),), {})],
    aten.fill.Scalar: [((1.5,), {})],
    aten.gelu.default: [((), {}), ((), {"approximate": "tanh"})],
    aten.gelu_backward.default: [((Y,), {}), ((Y,), {"approximate": "tanh"})],
    aten.hardtanh.default: [((), {}), ((-0.5, 2.0), {})],
    aten.hardtanh_backward.default: [((Y, -0.5, 0.5), {})],
    aten.leaky_relu.default: [((), {}), ((0.5,), {})],
    aten.leaky_relu_backward.default: [((Y, 0.1, False), {})],
    aten.masked_fill.Scalar: [((M, 7.0), {})],
    aten.maximum.default: [((Y,), {})],
    aten.minimum.default: [((Y,), {})],
    aten.mul.Scalar: [((-1.5,), {})],
    aten.mul.Tensor: [((Y,), {})],
    aten.pow.Tensor_Scalar: [((e,), {}) for e in (2, 3, 2.0, 0, 1)],
    aten.pow.Tensor_Tensor: [((N,), {})],
    aten.rsub.Scalar: [((2.0,), {}), ((2.0, 3.0), {})],
    aten.rsub.Tensor: [((Y,), {}), ((Y,), {"alpha": 2})],
    aten.sigmoid_backward.default: [((Y,), {})],
    aten.silu_backward.default: [((Y,), {})],
    aten.sub.Scalar: [((2.0,), {}), ((2.0, 3.0), {})],
    aten.sub.Tensor: [((Y,), {}), ((Y,), {"alpha": 2})],
    aten.tanh_backward.default: [((Y,), {})],
    aten.threshold.default: [((0.25, 9.0), {})],
    aten.threshold_backward.default: [((Y, 0.25), {})],
    **{getattr(aten, name).Scalar: [((0.5,), {})] for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{getattr(aten, name).Tensor: [((Y,), {})] for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}
# These operators take a positive first tensor, or a mask. Others take any values.
POSITIVE = {aten.log.default, aten.log1p.default, aten.rsqrt.default, aten.sqrt.default}
POSITIVE |= {aten.reciprocal.default}
ON_MASKS = {
    aten.bitwise_and.Tensor: [((M,), {})],
    aten.bitwise_or.Tensor: [((M,), {})],
    aten.bitwise_not.default: [((), {})],
    aten.logical_and.default: [((M,), {})],
    aten.logical_or.default: [((M,), {})],
    aten.logical_not.default: [((), {})],
    aten.where.self: [((Y, P), {})],
    aten.where.ScalarSelf: [((2.0, Y), {})],
    aten.where.ScalarOther: [((Y, 2.0), {})],
}
# Their second argument is a zero-dimensional tensor, which forward cannot make from a number.
WITH_SCALAR_TENSOR = {aten.fill.Tensor: ("fill", 2), aten.masked_fill.Tensor: ("masked_fill", 3)}
# PyTorch decomposes these for our device before they are lowered.
DECOMPOSED = {aten.silu_backward.default}

TOLERANCES = {
    torch.float32: {"rtol": 2e-6, "atol": 1e-6},
    torch.float16: {"rtol": 2e-3, "atol": 1e-3},
    torch.bool: {"rtol": 0, "atol": 0},
}


def cases():
    """Yield one test parameter per operator and call, for the whole table."""
    for target in RULES:
        if target in WITH_SCALAR_TENSOR:
            continue
        for args, kwargs in {**BEHIND, **ON_MASKS}.get(target, [((), {})]):
            name = str(target).removeprefix("aten.")
            yield pytest.param(target, args, kwargs, id=f"{name} {args} {kwargs}".strip())


CASES = list(cases())


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, *args):
        return self._function(*args)


def run(function, *inputs):
    """Return the results of a model and the kinds of the ops that compute it."""
    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    model = poptorch.inferenceModel(Function(function), options)
    result = model(*inputs)
    kinds = [op.kind for op in model.compiled.host_program.graph.ops if op.kind != "anchor"]
    return result, kinds


def tensors(dtype):
    generator = torch.Generator().manual_seed(5)
    y = torch.randn(3, 5, generator=generator)
    y[0, :3] = torch.tensor([0.5, 0.25, 0.0])  # at the thresholds above
    return {
        Y: y.to(dtype),
        P: (torch.rand(3, 5, generator=generator) + 0.5).to(dtype),
        M: torch.rand(3, 5, generator=generator) > 0.5,
        N: torch.randint(0, 4, (3, 5), generator=generator).to(dtype),
        "<x>": torch.randn(3, 5, generator=generator).to(dtype),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float", "half"])
@pytest.mark.parametrize("target, args, kwargs", CASES)
def test_every_rule(target, args, kwargs, dtype):
    known = tensors(dtype)
    first = "<x>"
    if target in ON_MASKS:
        first = M
    elif target in POSITIVE:
        first = P
    elif target in (aten.leaky_relu_backward.default, aten.pow.Tensor_Tensor):
        first = Y
    names = [first, *(a for a in args if isinstance(a, str))]
    inputs = [known[name] for name in names]

    def function(*given):
        values = iter(given[1:])
        rest = [next(values) if isinstance(a, str) else a for a in args]
        return target(given[0], *rest, **kwargs)

    actual, kinds = run(function, *inputs)
    expected = function(*inputs)
    same_type = target is aten._to_copy.default and kwargs["dtype"] == dtype
    if target in DECOMPOSED:
        assert set(kinds) == {"map"}
    else:
        assert kinds == ([] if same_type else ["map"])
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, **TOLERANCES[expected.dtype])


def test_the_whole_table_is_walked():
    walked = {case.values[0] for case in CASES} | set(WITH_SCALAR_TENSOR)
    assert walked == set(RULES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float", "half"])
def test_fill_and_masked_fill_with_a_tensor(dtype):
    known = tensors(dtype)
    x, mask, value = known["<x>"], known[M], torch.tensor(3.0, dtype=dtype)
    filled, _ = run(lambda x, v: aten.fill.Tensor(x, v), x, value)
    assert torch.equal(filled, torch.full_like(x, 3.0))
    masked, kinds = run(lambda x, m, v: aten.masked_fill.Tensor(x, m, v), x, mask, value)
    assert kinds == ["map"]
    assert torch.equal(masked, x.masked_fill(mask, 3.0))


SPECIAL = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-30, -1e30, 3e38, 1.0, -1.0])


@pytest.mark.parametrize(
    "target",
    [
        t
        for t in RULES
        if len(t._schema.arguments) == 1 and t not in ON_MASKS and t not in (aten._to_copy.default,)
    ],
    ids=str,
)
def test_special_values(target):
    actual, _ = run(lambda x: target(x), SPECIAL)
    expected = target(SPECIAL)
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=0, equal_nan=True)
    zeros = expected == 0
    assert torch.equal(actual[zeros].signbit(), expected[zeros].signbit())


@pytest.mark.parametrize("name", ["maximum", "minimum", "add", "mul", "div", "pow"])
def test_special_values_of_two_operands(name):
    a, b = torch.meshgrid(SPECIAL, SPECIAL, indexing="ij")
    function = getattr(torch, name)
    actual, _ = run(function, a.contiguous(), b.contiguous())
    torch.testing.assert_close(actual, function(a, b), rtol=2e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons_with_nan(name):
    a, b = torch.meshgrid(SPECIAL, SPECIAL, indexing="ij")
    function = getattr(torch, name)
    actual, _ = run(function, a.contiguous(), b.contiguous())
    assert torch.equal(actual, function(a, b))


@pytest.mark.parametrize("low, high", [(-0.5, 0.5), (0.5, -0.5), (math.nan, 1.0)])
def test_clamp_of_special_values(low, high):
    actual, _ = run(lambda x: x.clamp(low, high), SPECIAL)
    assert torch.equal(actual.nan_to_num(7.0), SPECIAL.clamp(low, high).nan_to_num(7.0))


@pytest.mark.parametrize("exponent", [2, 3, 0.5, -0.5, -1, -2, 1.5, 0.0, 1.0, 7])
def test_powers_of_positive_numbers(exponent):
    x = torch.tensor([0.0, 1e-3, 0.5, 1.0, 2.0, 100.0])
    actual, _ = run(lambda x: x**exponent, x)
    torch.testing.assert_close(actual, x**exponent, rtol=2e-6, atol=0)


@pytest.mark.parametrize("source", [torch.float16, torch.float32, torch.bool, torch.int32], ids=str)
@pytest.mark.parametrize("target", [torch.float16, torch.float32, torch.bool, torch.int32], ids=str)
def test_casts(source, target):
    x = torch.tensor([0.0, 1.0, 2.0, -3.0, 0.5, 1000.25]).to(source)
    actual, _ = run(lambda x: x.to(target), x)
    assert actual.dtype == target
    assert torch.equal(actual, x.to(target))


def test_casting_nan_and_infinity_to_bool():
    x = torch.tensor([math.nan, math.inf, 0.0, -0.0])
    actual, _ = run(lambda x: x.bool(), x)
    assert actual.tolist() == [True, True, False, False]


def test_a_half_result_is_rounded_after_every_operator():
    x = torch.tensor([2048.0]).half()
    actual, kinds = run(lambda x: (x + 1) - x, x)
    assert kinds == ["map"]
    assert actual.tolist() == [0.0]


def test_half_overflows_between_operators():
    x = torch.tensor([60000.0]).half()
    actual, _ = run(lambda x: (x * 2) * 0.25, x)
    assert actual.tolist() == [math.inf]


def test_a_chain_is_one_op():
    actual, kinds = run(lambda x: torch.relu(torch.tanh(x) * 2 + 1).sqrt(), torch.ones(4))
    assert kinds == ["map"]
    torch.testing.assert_close(actual, (torch.tanh(torch.ones(4)) * 2 + 1).sqrt())


@pytest.mark.parametrize(
    "shapes", [((3, 1), (1, 4)), ((4,), (2, 3, 4)), ((), (5,)), ((2, 1, 3), (4, 1)), ((1,), ())]
)
def test_broadcasting(shapes):
    a, b = (torch.randn(shape) for shape in shapes)
    actual, _ = run(lambda a, b: a * b + a, a, b)
    torch.testing.assert_close(actual, a * b + a)


def test_operands_of_any_layout():
    x = torch.randn(4, 3, 2)
    actual, _ = run(lambda x: x.permute(2, 0, 1) + x.transpose(0, 2)[:, :, :1].mT, x)
    expected = x.permute(2, 0, 1) + x.transpose(0, 2)[:, :, :1].mT
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("value", [1, 1.5, True])
def test_half_with_a_python_number_stays_half(value):
    actual, _ = run(lambda x: x + value, torch.ones(2).half())
    assert actual.dtype == torch.float16


def test_half_with_float_is_float():
    actual, _ = run(lambda a, b: a + b, torch.ones(2).half(), torch.ones(2))
    assert actual.dtype == torch.float32


INTEGERS = {
    "add": lambda x: x + 1,
    "float": lambda x: x + 1.5,
    "mul": lambda x: x * x,
    "div": lambda x: x / 2,
    "floor": lambda x: x // 2,
    "mod": lambda x: x % 3,
    "compare": lambda x: x > 1,
    "where": lambda x: torch.where(x > 1, x, 0),
    "clamp": lambda x: x.clamp(0, 2),
    "neg": lambda x: -x,
    "and": lambda x: x & 3,
    "shift": lambda x: x << 2,
    "bool": lambda x: (x > 0) & (x < 3),
    "bool plus": lambda x: (x > 0) + (x > 1),
}


@pytest.mark.parametrize("function", INTEGERS.values(), ids=INTEGERS)
def test_integers(function):
    x = torch.tensor([-7, -1, 0, 1, 2, 2**30], dtype=torch.int32)
    actual, _ = run(function, x)
    assert actual.dtype == function(x).dtype
    assert torch.equal(actual, function(x))


class Permuted(torch.nn.Module):
    """An elementwise model on a permuted tensor, read again in both orders."""

    def __init__(self, *order: int) -> None:
        super().__init__()
        self.order = order

    def forward(self, x):
        y = torch.sin(x.permute(self.order) * 2)
        return y, y.transpose(-1, -2).reshape(-1), (y @ y.transpose(-1, -2)).exp()


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((3, 3), (1, 0)),
        ((4, 3), (1, 0)),
        ((3, 3, 3), (2, 0, 1)),
        ((1, 1, 3, 3), (0, 1, 3, 2)),
        ((2, 3, 4, 5), (3, 1, 0, 2)),
        ((5, 1, 5, 5), (2, 1, 3, 0)),
        ((2, 2, 2, 2), (0, 3, 1, 2)),
    ],
    ids=str,
)
def test_results_of_permuted_inputs(shape, order):
    x = torch.rand(shape) - 0.5
    options = poptorch.Options().showCompilationProgressBar(False)
    ours = poptorch.inferenceModel(Permuted(*order), options)(x)
    for mine, theirs in zip(ours, Permuted(*order)(x), strict=True):
        torch.testing.assert_close(mine, theirs)
