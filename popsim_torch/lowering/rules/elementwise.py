"""Elementwise operators as formulas of the ``map`` op.

All values are computed in float32; results of float16 operators are rounded to float16 after every
operator, as PyTorch does.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.fx

from popsim_torch.ir.map_code import Formula, MapCode, MapValue
from popsim_torch.lowering.emit.builder import Builder, Place, Value
from popsim_torch.lowering.emit.maps import emit_map
from popsim_torch.lowering.rules.rule import Rule, operands
from popsim_torch.lowering.rules.views import another_name, keeps_type

aten = torch.ops.aten

_COMPUTED = frozenset({torch.float32, torch.float16, torch.bool})
_CAST_FROM = _COMPUTED | {torch.uint8, torch.int32, torch.int64, torch.bfloat16}


def _unary(name: str) -> Formula:
    return lambda code, x: code(name, x)


def _binary(name: str) -> Formula:
    return lambda code, a, b: code(name, a, b)


def _add(code: MapCode, a: Any, b: Any, alpha: float = 1) -> MapValue:
    return code("add", a, b if alpha == 1 else code("mul", b, alpha))


def _sub(code: MapCode, a: Any, b: Any, alpha: float = 1) -> MapValue:
    return code("sub", a, b if alpha == 1 else code("mul", b, alpha))


def _rsub(code: MapCode, a: Any, b: Any, alpha: float = 1) -> MapValue:
    return _sub(code, b, a, alpha)


def _pow_scalar(code: MapCode, x: Any, exponent: float) -> MapValue:
    if exponent == 2:
        return code("mul", x, x)
    if exponent == 3:
        return code("mul", code("mul", x, x), x)
    if exponent == 0.5:
        return code("sqrt", x)
    if exponent == -0.5:
        return code("rsqrt", x)
    if exponent == -1:
        return code("reciprocal", x)
    return code("pow", x, exponent)


def _clamp(code: MapCode, x: Any, low: float | None = None, high: float | None = None) -> MapValue:
    return code("clamp", x, -math.inf if low is None else low, math.inf if high is None else high)


def _hardtanh(code: MapCode, x: Any, low: float = -1, high: float = 1) -> MapValue:
    return _clamp(code, x, low, high)


def _hardtanh_backward(code: MapCode, gradient: Any, x: Any, low: float, high: float) -> MapValue:
    outside = code("or", code("le", x, low), code("ge", x, high))
    return code("where", outside, 0.0, gradient)


def _threshold(code: MapCode, x: Any, threshold: float, value: float) -> MapValue:
    return code("where", code("le", x, threshold), value, x)


def _threshold_backward(code: MapCode, gradient: Any, x: Any, threshold: float) -> MapValue:
    return code("where", code("le", x, threshold), 0.0, gradient)


def _sigmoid_backward(code: MapCode, gradient: Any, y: Any) -> MapValue:
    return code("mul", gradient, code("mul", code("sub", 1.0, y), y))


def _tanh_backward(code: MapCode, gradient: Any, y: Any) -> MapValue:
    return code("mul", gradient, code("sub", 1.0, code("mul", y, y)))


def _leaky_relu(code: MapCode, x: Any, slope: float = 0.01) -> MapValue:
    return code("where", code("gt", x, 0.0), x, code("mul", x, slope))


def _leaky_relu_backward(
    code: MapCode, gradient: Any, x: Any, slope: float, _self_is_result: bool
) -> MapValue:
    return code("where", code("gt", x, 0.0), gradient, code("mul", gradient, slope))


def _silu(code: MapCode, x: Any) -> MapValue:
    return code("div", x, code("add", 1.0, code("exp", code("neg", x))))


def _silu_backward(code: MapCode, gradient: Any, x: Any) -> MapValue:
    sigmoid = code("div", 1.0, code("add", 1.0, code("exp", code("neg", x))))
    inner = code("add", 1.0, code("mul", x, code("sub", 1.0, sigmoid)))
    return code("mul", code("mul", gradient, sigmoid), inner)


def _gelu(code: MapCode, x: Any, approximate: str = "none") -> MapValue:
    if approximate == "tanh":
        return code(
            "mul", code("mul", 0.5, x), code("add", 1.0, code("tanh", _gelu_inner(code, x)))
        )
    cdf = code("add", 1.0, code("erf", code("mul", x, math.sqrt(0.5))))
    return code("mul", code("mul", x, 0.5), cdf)


def _gelu_inner(code: MapCode, x: Any) -> MapValue:
    cube = code("mul", code("mul", x, x), x)
    return code("mul", math.sqrt(2 / math.pi), code("add", x, code("mul", 0.044715, cube)))


def _gelu_backward(code: MapCode, gradient: Any, x: Any, approximate: str = "none") -> MapValue:
    if approximate == "tanh":
        tanh = code("tanh", _gelu_inner(code, x))
        left = code("mul", 0.5, code("add", 1.0, tanh))
        slope = code(
            "mul",
            math.sqrt(2 / math.pi),
            code("add", 1.0, code("mul", 3 * 0.044715, code("mul", x, x))),
        )
        right = code(
            "mul",
            code("mul", 0.5, x),
            code("mul", code("sub", 1.0, code("mul", tanh, tanh)), slope),
        )
        return code("mul", gradient, code("add", left, right))
    cdf = code("mul", 0.5, code("add", 1.0, code("erf", code("mul", x, math.sqrt(0.5)))))
    density = code(
        "mul", code("exp", code("mul", code("mul", x, x), -0.5)), 1 / math.sqrt(2 * math.pi)
    )
    return code("mul", gradient, code("add", cdf, code("mul", x, density)))


def _where(code: MapCode, condition: Any, a: Any, b: Any) -> MapValue:
    return code("where", condition, a, b)


def _masked_fill(code: MapCode, x: Any, mask: Any, value: Any) -> MapValue:
    return code("where", mask, value, x)


def _addcmul(code: MapCode, x: Any, a: Any, b: Any, value: float = 1) -> MapValue:
    product = code("mul", a if value == 1 else code("mul", a, value), b)
    return code("add", x, product)


def _addcdiv(code: MapCode, x: Any, a: Any, b: Any, value: float = 1) -> MapValue:
    return code("add", x, code("div", a if value == 1 else code("mul", a, value), b))


def _source(code: MapCode, _target: Any, source: Any, _non_blocking: bool = False) -> MapValue:
    return code.value(source)


def _cast(code: MapCode, x: Any, **_options: Any) -> MapValue:
    return code.value(x)


def _fill(code: MapCode, _x: Any, value: Any) -> MapValue:
    return code.value(value)


_COMPARISONS = {name: _binary(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
FORMULAS: dict[Any, Formula] = {
    aten.add.Scalar: _add,
    aten.add.Tensor: _add,
    aten.addcdiv.default: _addcdiv,
    aten.addcmul.default: _addcmul,
    aten.bitwise_and.Tensor: _binary("and"),
    aten.bitwise_not.default: _unary("not"),
    aten.bitwise_or.Tensor: _binary("or"),
    aten.clamp.default: _clamp,
    aten.clamp_max.default: lambda code, x, high: _clamp(code, x, None, high),
    aten.clamp_min.default: _clamp,
    aten.div.Scalar: _binary("div"),
    aten.div.Tensor: _binary("div"),
    aten.fill.Scalar: _fill,
    aten.fill.Tensor: _fill,
    aten.gelu.default: _gelu,
    aten.gelu_backward.default: _gelu_backward,
    aten.hardtanh.default: _hardtanh,
    aten.hardtanh_backward.default: _hardtanh_backward,
    aten.leaky_relu.default: _leaky_relu,
    aten.leaky_relu_backward.default: _leaky_relu_backward,
    aten.logical_and.default: _binary("and"),
    aten.logical_not.default: _unary("not"),
    aten.logical_or.default: _binary("or"),
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.maximum.default: _binary("max"),
    aten.minimum.default: _binary("min"),
    aten.mul.Scalar: _binary("mul"),
    aten.mul.Tensor: _binary("mul"),
    aten.pow.Tensor_Scalar: _pow_scalar,
    aten.pow.Tensor_Tensor: _binary("pow"),
    aten.rsub.Scalar: _rsub,
    aten.rsub.Tensor: _rsub,
    aten.sigmoid_backward.default: _sigmoid_backward,
    aten.silu.default: _silu,
    aten.silu_backward.default: _silu_backward,
    aten.sub.Scalar: _sub,
    aten.sub.Tensor: _sub,
    aten.tanh_backward.default: _tanh_backward,
    aten.threshold.default: _threshold,
    aten.threshold_backward.default: _threshold_backward,
    aten.where.ScalarSelf: _where,
    aten.where.ScalarOther: _where,
    aten.where.self: _where,
    **{getattr(aten, name).Scalar: rule for name, rule in _COMPARISONS.items()},
    **{getattr(aten, name).Tensor: rule for name, rule in _COMPARISONS.items()},
    **{getattr(aten, name).default: _unary("neg") for name in ("_neg_view", "_neg_view_copy")},
    **{
        getattr(aten, name).default: _unary(instruction)
        for name, instruction in {
            "abs": "abs",
            "ceil": "ceil",
            "cos": "cos",
            "erf": "erf",
            "exp": "exp",
            "expm1": "expm1",
            "floor": "floor",
            "log": "log",
            "log1p": "log1p",
            "neg": "neg",
            "reciprocal": "reciprocal",
            "relu": "relu",
            "round": "round",
            "sgn": "sign",
            "rsqrt": "rsqrt",
            "sigmoid": "sigmoid",
            "sign": "sign",
            "sin": "sin",
            "sqrt": "sqrt",
            "square": "square",
            "tanh": "tanh",
            "trunc": "trunc",
        }.items()
    },
}
_ON_BOOL = frozenset(
    {
        aten.bitwise_and.Tensor,
        aten.bitwise_or.Tensor,
        aten.bitwise_not.default,
        aten.logical_and.default,
        aten.logical_or.default,
        aten.logical_not.default,
    }
)
# These convert their operands to a common dtype first. Products and quotients take a second operand
# of one element as it is.
_TIMES = frozenset({aten.mul.Scalar, aten.mul.Tensor, aten.div.Scalar, aten.div.Tensor})
_CONVERTS_OPERANDS = (
    _TIMES
    | {aten.add.Scalar, aten.add.Tensor, aten.sub.Scalar, aten.sub.Tensor}
    | {aten.rsub.Scalar, aten.rsub.Tensor}
    | {aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.addcmul.default, aten.addcdiv.default}
    | {getattr(getattr(aten, name), kind) for name in _COMPARISONS for kind in ("Scalar", "Tensor")}
)
_ARITHMETIC_ON_BOOL = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor})


def is_map(node: torch.fx.Node) -> bool:
    """Return whether the ``map`` op has the meaning of a node for operands that it can read."""
    result = node.meta["val"]
    if node.target in _ON_BOOL and result.dtype != torch.bool:
        return False
    if node.target in _ARITHMETIC_ON_BOOL and result.dtype == torch.bool:
        return False
    if any(isinstance(value, complex) for value in (*node.args, *node.kwargs.values())):
        return False
    return bool(result.numel() > 0)


def _is_computed(node: torch.fx.Node) -> bool:
    """Return whether the ``map`` op can compute a node exactly."""
    if node.meta["val"].dtype not in _COMPUTED or not is_map(node):
        return False
    return all(source.dtype in _COMPUTED for source in operands(node))


def _is_converted(node: torch.fx.Node) -> bool:
    """Return whether the ``map`` op can convert a node's input exactly."""
    result = node.meta["val"]
    if result.dtype not in _COMPUTED or result.numel() == 0:
        return False
    # PyTorch converts to bool, and from integers to float16, in other ways.
    known = _CAST_FROM if result.dtype == torch.float32 else _COMPUTED
    return all(source.dtype in known for source in operands(node))


def _lower(formula: Formula, builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    """Add a ``map`` op for a node."""
    code = MapCode()

    def given(value: Any) -> Any:
        return code.value(builder.tensor(value)) if isinstance(value, torch.fx.Node) else value

    args = [given(value) for value in node.args]
    kwargs = {key: given(value) for key, value in node.kwargs.items()}
    if _converts_to_half(node):
        _convert_to_half(code, node, args, kwargs)
    result = code.value(formula(code, *args, **kwargs))
    return emit_map(builder, code, result, node.meta["val"].dtype, node.meta["val"].shape, place)


def _converts_to_half(node: torch.fx.Node) -> bool:
    """Return whether PyTorch converts the operands of a node to float16 first."""
    if node.target not in _CONVERTS_OPERANDS:
        return False
    dtype = node.meta["val"].dtype
    if dtype != torch.bool:
        return bool(dtype == torch.float16)
    floating = [one for one in operands(node) if one.dtype.is_floating_point]
    deciding = [one for one in floating if one.dim() > 0] or floating
    return {one.dtype for one in deciding} == {torch.float16}


def _convert_to_half(
    code: MapCode, node: torch.fx.Node, args: list[Any], kwargs: dict[str, Any]
) -> None:
    """Round the operands of a node that are not in float16 to it."""
    for position, source in enumerate(node.args):
        if isinstance(source, torch.fx.Node):
            traced = source.meta["val"]
            is_one, is_rounded = traced.numel() == 1, traced.dtype != torch.float32
        else:
            is_one, is_rounded = True, False
        if not is_rounded and not (is_one and position == 1 and node.target in _TIMES):
            args[position] = _in_half(code, args[position])
    if "alpha" in kwargs:  # (the kernels for vectors do not round the scaled operand)
        kwargs["alpha"] = _in_half(code, kwargs["alpha"])


def _in_half(code: MapCode, value: Any) -> Any:
    """Return a value or a number, rounded to float16."""
    if isinstance(value, MapValue):
        return code("half", value)
    return torch.tensor(value, dtype=torch.float64).half().item()


def _to_copy(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    if keeps_type(node):
        return another_name(builder, builder.tensor(node.args[0]))
    return _lower(_cast, builder, node, place)


RULES: dict[Any, Rule] = {
    aten._to_copy.default: Rule(_to_copy, lambda node: keeps_type(node) or _is_converted(node)),
    aten.copy.default: Rule(functools.partial(_lower, _source), _is_converted),
    **{
        target: Rule(functools.partial(_lower, formula), _is_computed)
        for target, formula in FORMULAS.items()
    },
}
