"""Concatenation, parts of a tensor at a dynamic position, and gradients of parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from popsim_torch.ir import Attribute
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
    **{target: Rule(_into_zeros, _keeps_type) for target in _INTO_ZEROS},
}
