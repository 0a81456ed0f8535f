"""Concatenation, other parts of a tensor, also at a dynamic position, and gradients of parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from popsim_torch.ir import Attribute, Tensor
from popsim_torch.lowering.emit.builder import Builder, Place, Value
from popsim_torch.lowering.rules.rule import Rule, all_filled, operands
from popsim_torch.trace.dynamic_slices import DYNAMIC_SLICE, DYNAMIC_UPDATE

aten = torch.ops.aten

# The view of a tensor of zeros to which each operator writes its gradient.
_INTO_ZEROS: dict[Any, Any] = {
    aten.select_backward.default: aten.select.int,
    aten.slice_backward.default: aten.slice.Tensor,
}


def _keeps_type(node: torch.fx.Node) -> bool:
    return all_filled(operands(node), frozenset({node.meta["val"].dtype}))


def _is_of_one_rank(node: torch.fx.Node) -> bool:
    rank = node.meta["val"].dim()
    return _keeps_type(node) and all(part.dim() == rank for part in operands(node))


def _cat(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    arguments: Any = node.args
    value = node.meta["val"]
    out = builder.value(value.dtype, value.shape)
    axis: Any = arguments[1] if len(arguments) > 1 else node.kwargs.get("dim", 0)
    parts = [builder.tensor(part) for part in arguments[0]]
    builder.op("cat", parts, [out], {"axis": int(axis) % value.dim()}, place=place)
    return out


def _into_zeros(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    arguments: Any = node.args
    gradient, sizes, *where = arguments
    value = node.meta["val"]
    out = builder.value(value.dtype, value.shape)
    part = _INTO_ZEROS[node.target](torch.empty(sizes, device="meta"), *where)
    attributes: dict[str, Attribute] = {
        "shape": [int(size) for size in sizes],
        "strides": list(part.stride()),
        "offset": int(part.storage_offset()),
    }
    builder.op("into_zeros", [builder.tensor(gradient)], [out], attributes, place=place)
    return out


def _slice_of(node: torch.fx.Node) -> tuple[Any, Any, int, int, int, int]:
    """Return the tensor, the new part, and the part's axis, start, end and step."""

    def arguments(
        x: Any,
        src: Any,
        dim: int = 0,
        start: int | None = None,
        end: int | None = None,
        step: int = 1,
    ) -> tuple[Any, Any, int, int, int, int]:
        shape = node.meta["val"].shape
        begin, stop, step = slice(start, end, step).indices(shape[dim])
        return x, src, dim % len(shape), begin, max(begin, stop), step

    given: Any = node.args, node.kwargs
    return arguments(*given[0], **given[1])


def _is_a_piece(node: torch.fx.Node) -> bool:
    *_, step = _slice_of(node)
    return step == 1 and node.meta["val"].dim() > 0 and _keeps_type(node)


def _slice_scatter(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    """Put a part between what is before it and after it: each element is written once."""
    x, src, axis, start, end, _ = _slice_of(node)
    return _between(builder, node, place, (x, src, axis, start, end))


def _select_scatter(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    given: Any = node.args
    x, src, dim, index = given
    shape = node.meta["val"].shape
    axis = dim % len(shape)
    start = index % shape[axis]
    return _between(builder, node, place, (x, src, axis, start, start + 1))


def _between(
    builder: Builder, node: torch.fx.Node, place: Place, where: tuple[Any, Any, int, int, int]
) -> Value:
    x, src, axis, start, end = where
    value = node.meta["val"]
    out = builder.value(value.dtype, value.shape)
    whole, part = builder.tensor(x), builder.tensor(src)

    def piece(begin: int, stop: int) -> Tensor:
        shape = [*whole.shape[:axis], stop - begin, *whole.shape[axis + 1 :]]
        offset = whole.offset + begin * whole.strides[axis]
        return builder.graph.add_view(whole, shape, whole.strides, offset)

    if len(part.shape) < len(whole.shape):
        shape = [*part.shape[:axis], 1, *part.shape[axis:]]
        strides = [*part.strides[:axis], 0, *part.strides[axis:]]
        part = builder.graph.add_view(part, shape, strides, part.offset)
    pieces = [piece(0, start)] if start > 0 else []
    pieces += [part] if end > start else []
    pieces += [piece(end, whole.shape[axis])] if end < whole.shape[axis] else []
    builder.op("cat", pieces, [out], {"axis": axis}, place=place)
    return out


def _dynamic_slice(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    arguments: Any = node.args
    x, start, axis, count, step, wraps = arguments
    value = node.meta["val"]
    out = builder.value(value.dtype, value.shape)
    attributes: dict[str, Attribute] = {"axis": axis, "count": count, "step": step, "wraps": wraps}
    inputs = [builder.tensor(x), builder.tensor(start)]
    builder.op("dynamic_slice", inputs, [out], attributes, place=place)
    return out


def _dynamic_update(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    arguments: Any = node.args
    *tensors, axis, step, wraps = arguments
    value = node.meta["val"]
    out = builder.value(value.dtype, value.shape)
    inputs = [builder.tensor(tensor) for tensor in tensors]
    attributes: dict[str, Attribute] = {"axis": axis, "step": step, "wraps": wraps}
    builder.op("dynamic_update", inputs, [out], attributes, place=place)
    return out


RULES: dict[Any, Rule] = {
    DYNAMIC_SLICE: Rule(_dynamic_slice),
    DYNAMIC_UPDATE: Rule(_dynamic_update),
    aten.cat.default: Rule(_cat, _is_of_one_rank),
    aten.slice_scatter.default: Rule(_slice_scatter, _is_a_piece),
    aten.select_scatter.default: Rule(_select_scatter, _keeps_type),
    **{target: Rule(_into_zeros, _keeps_type) for target in _INTO_ZEROS},
}
