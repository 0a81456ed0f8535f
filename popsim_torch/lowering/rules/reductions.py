"""Sums, means and extremes over axes, and running sums."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.fx

from popsim_torch.dtypes import dtype_name
from popsim_torch.ir import Attribute, Tensor
from popsim_torch.lowering.emit.builder import Builder, Place, Value
from popsim_torch.lowering.rules.rule import FLOATING, Rule, all_filled, operands
from popsim_torch.trace.cumprod import CUMPROD, CUMPROD_GRAD

aten = torch.ops.aten


def _is_floating(node: torch.fx.Node) -> bool:
    return node.meta["val"].dtype in FLOATING and all_filled(operands(node), FLOATING)


def _lower(
    function: str, has_axes: bool, builder: Builder, node: torch.fx.Node, place: Place
) -> Value:
    """Add a ``reduce`` op for a node; its second argument may have the axes."""
    arguments: Any = node.args
    source = builder.tensor(arguments[0])
    rank = len(source.shape)
    given = arguments[1] if has_axes and len(arguments) > 1 else None
    if isinstance(given, int):
        given = [given]
    axes = sorted({int(axis) % rank for axis in given}) if given and rank else list(range(rank))
    keepdim = arguments[2] if has_axes and len(arguments) > 2 else node.kwargs.get("keepdim")
    value = node.meta["val"]
    return reduce_over(builder, source, value, function, axes, place, keepdim=bool(keepdim))


def reduce_all(
    builder: Builder, source: Tensor, value: torch.Tensor, function: str, place: Place
) -> Tensor:
    """Add a ``reduce`` op over all axes.

    Args:
        builder: The graph under construction.
        source: The tensor to reduce.
        value: Has shape and dtype of the result.
        function: The function of the op.
        place: The place of the op.
    """
    return reduce_over(builder, source, value, function, range(len(source.shape)), place)


def reduce_over(
    builder: Builder,
    source: Tensor,
    value: torch.Tensor,
    function: str,
    axes: Iterable[int],
    place: Place,
    *,
    keepdim: bool = False,
) -> Tensor:
    """Add a ``reduce`` op.

    Args:
        builder: The graph under construction.
        source: The tensor to reduce.
        value: Has shape and dtype of the result.
        function: The function of the op.
        axes: The axes to reduce, ascending.
        place: The place of the op.
        keepdim: Whether the axes stay, with size 1.
    """
    out = builder.value(value.dtype, value.shape)
    attributes: dict[str, Attribute] = {
        "function": function,
        "axes": list(axes),
        "keepdim": keepdim,
        "dtype": dtype_name(value.dtype),
    }
    builder.op("reduce", [source], [out], attributes, place=place)
    return out


def _along(kind: str, builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    """Add an op along an axis for a node: the argument after its tensors."""
    sources = [builder.tensor(source) for source in node.all_input_nodes]
    axis: Any = node.args[len(sources)]
    value = node.meta["val"]
    out = builder.value(value.dtype, value.shape)
    attributes: dict[str, Attribute] = {"axis": int(axis) % value.dim()}
    builder.op(kind, sources, [out], attributes, place=place)
    return out


def _extreme(function: str, builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    arguments: Any = node.args
    values, positions = node.meta["val"]
    outputs: list[Tensor | None] = [builder.value(values.dtype, values.shape), None]
    if 1 in builder.used_results(node):
        outputs[1] = builder.value(positions.dtype, positions.shape)
    attributes: dict[str, Attribute] = {
        "axis": int(arguments[1]) % values.dim(),
        "function": function,
    }
    source = builder.tensor(arguments[0])
    builder.op("running_extreme", [source], outputs, attributes, place=place)
    return outputs


def _has_extremes(node: torch.fx.Node) -> bool:
    return all_filled(operands(node), FLOATING) and operands(node)[0].dim() > 0


def _keeps_dtype(node: torch.fx.Node) -> bool:
    value = node.meta["val"]
    return _is_floating(node) and value.dim() > 0 and operands(node)[0].dtype == value.dtype


def _along_rule(kind: str) -> Rule:
    return Rule(functools.partial(_along, kind), _keeps_dtype)


def _extreme_rule(function: str) -> Rule:
    return Rule(functools.partial(_extreme, function), _has_extremes)


def _rule(function: str, *, has_axes: bool) -> Rule:
    return Rule(functools.partial(_lower, function, has_axes), _is_floating)


RULES: dict[Any, Rule] = {
    aten.amax.default: _rule("amax", has_axes=True),
    aten.amin.default: _rule("amin", has_axes=True),
    CUMPROD: _along_rule("cumprod"),
    CUMPROD_GRAD: _along_rule("cumprod_grad"),
    aten.cummax.default: _extreme_rule("max"),
    aten.cummin.default: _extreme_rule("min"),
    aten.cumprod.default: _along_rule("cumprod"),
    aten.cumsum.default: _along_rule("cumsum"),
    aten.logcumsumexp.default: _along_rule("logcumsumexp"),
    aten.mean.default: _rule("mean", has_axes=False),
    aten.mean.dim: _rule("mean", has_axes=True),
    aten.sum.default: _rule("sum", has_axes=False),
    aten.sum.dim_IntList: _rule("sum", has_axes=True),
}
