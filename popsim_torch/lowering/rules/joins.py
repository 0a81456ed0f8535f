"""Concatenation, and gradients of parts of a tensor: zeros around the gradient of the part."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from popsim_torch.ir import Attribute
from popsim_torch.lowering.builder import Builder, Place, Value

aten = torch.ops.aten

# The view of a tensor of zeros that each of these writes its gradient to.
_INTO_ZEROS: dict[Any, Any] = {
    aten.select_backward.default: aten.select.int,
    aten.slice_backward.default: aten.slice.Tensor,
}


def is_join(node: torch.fx.Node) -> bool:
    """Whether a node puts tensors into parts of a new one."""
    if node.target is not aten.cat.default and node.target not in _INTO_ZEROS:
        return False
    result = node.meta["val"]
    parts = [source.meta["val"] for source in node.all_input_nodes]
    return all(
        part.dtype == result.dtype
        and part.numel() > 0
        and (part.dim() == result.dim() or node.target is not aten.cat.default)
        for part in parts
    )


def lower_join(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    """Add a ``cat`` or ``into_zeros`` op for a node."""
    arguments: Any = node.args
    value = node.meta["val"]
    out = builder.value(value.dtype, value.shape)
    if node.target is aten.cat.default:
        axis: Any = arguments[1] if len(arguments) > 1 else node.kwargs.get("dim", 0)
        parts = [builder.tensor(part) for part in arguments[0]]
        builder.op("cat", parts, [out], {"axis": int(axis) % value.dim()}, place=place)
        return out
    gradient, sizes, *where = arguments
    part = _INTO_ZEROS[node.target](torch.empty(sizes, device="meta"), *where)
    attributes: dict[str, Attribute] = {
        "shape": [int(size) for size in sizes],
        "strides": list(part.stride()),
        "offset": int(part.storage_offset()),
    }
    builder.op("into_zeros", [builder.tensor(gradient)], [out], attributes, place=place)
    return out
