"""Sums, means and extremes over axes, and the loss that is a mean of squares."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from popsim_torch.ir import Attribute, Tensor
from popsim_torch.lowering.builder import Builder, Place, Value
from popsim_torch.lowering.elementwise import Code, emit_map

aten = torch.ops.aten

_FLOATING = frozenset({torch.float16, torch.bfloat16, torch.float32})
_MAPPED = frozenset({torch.float16, torch.float32})
_SQUARED_ERRORS = frozenset({aten.mse_loss.default, aten.mse_loss_backward.default})
_NONE, _MEAN = 0, 1  # numbers of torch's enum of reductions

# The function of the ``reduce`` op and whether the second argument says over which axes.
RULES: dict[Any, tuple[str, bool]] = {
    aten.amax.default: ("amax", True),
    aten.amin.default: ("amin", True),
    aten.mean.default: ("mean", False),
    aten.mean.dim: ("mean", True),
    aten.sum.default: ("sum", False),
    aten.sum.dim_IntList: ("sum", True),
}


def is_reduction(node: torch.fx.Node) -> bool:
    """Whether the ``reduce`` op can compute a node."""
    if node.target not in RULES:
        return False
    source = node.all_input_nodes[0].meta["val"]
    result = node.meta["val"].dtype
    return source.dtype in _FLOATING and result in _FLOATING and source.numel() > 0


def is_squared_error(node: torch.fx.Node) -> bool:
    """Whether a node is a mean squared error or its gradient, in types that ``map`` computes."""
    return node.target in _SQUARED_ERRORS and all(
        source.meta["val"].dtype in _MAPPED and source.meta["val"].numel() > 0
        for source in node.all_input_nodes
    )


def lower_squared_error(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    """Add ``map`` and ``reduce`` ops for a node."""
    arguments: Any = node.args
    value = node.meta["val"]
    code = Code()
    if node.target is aten.mse_loss.default:
        x, y = (builder.tensor(argument) for argument in arguments[:2])
        reduction = arguments[2] if len(arguments) > 2 else _MEAN
        difference = code("sub", x, y)
        squares = code("mul", difference, difference)
        if reduction == _NONE:
            return emit_map(builder, code, squares, value.dtype, value.shape, place)
        errors = emit_map(builder, code, squares, torch.float32, x.shape, place)
        return _reduce(
            builder,
            errors,
            value,
            "mean" if reduction == _MEAN else "sum",
            list(range(len(errors.shape))),
            keepdim=False,
            place=place,
        )
    gradient, x, y = (builder.tensor(argument) for argument in arguments[:3])
    factor = 2.0 / value.numel() if arguments[3] == _MEAN else 2.0
    slope = code("mul", factor, code("sub", x, y))
    result = code("mul", slope, gradient)
    return emit_map(builder, code, result, value.dtype, value.shape, place)


def lower_reduction(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    """Add a ``reduce`` op for a node."""
    arguments: Any = node.args
    function, has_axes = RULES[node.target]
    source = builder.tensor(arguments[0])
    rank = len(source.shape)
    given = arguments[1] if has_axes and len(arguments) > 1 else None
    if isinstance(given, int):
        given = [given]
    axes = sorted({int(axis) % rank for axis in given}) if given and rank else list(range(rank))
    keepdim = arguments[2] if has_axes and len(arguments) > 2 else node.kwargs.get("keepdim")
    value = node.meta["val"]
    return _reduce(builder, source, value, function, axes, keepdim=bool(keepdim), place=place)


def _reduce(
    builder: Builder,
    source: Tensor,
    value: torch.Tensor,
    function: str,
    axes: list[int],
    *,
    keepdim: bool,
    place: Place,
) -> Tensor:
    out = builder.value(value.dtype, value.shape)
    attributes: dict[str, Attribute] = {
        "function": function,
        "axes": axes,
        "keepdim": keepdim,
        "dtype": str(value.dtype).removeprefix("torch."),
    }
    builder.op("reduce", [source], [out], attributes, place=place)
    return out
