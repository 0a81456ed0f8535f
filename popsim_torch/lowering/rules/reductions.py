"""Sums, means and extremes over axes."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from popsim_torch.ir import Attribute, Tensor
from popsim_torch.lowering.builder import Builder, Place, Value

aten = torch.ops.aten

_FLOATING = frozenset({torch.float16, torch.bfloat16, torch.float32})

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


def reduce_all(
    builder: Builder, source: Tensor, value: torch.Tensor, function: str, place: Place
) -> Tensor:
    """Add a ``reduce`` op over all axes.

    Args:
        builder: The graph under construction.
        source: What is reduced.
        value: Gives shape and element type of the result.
        function: Of the op.
        place: Where it belongs.
    """
    axes = list(range(len(source.shape)))
    return _reduce(builder, source, value, function, axes, keepdim=False, place=place)


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
