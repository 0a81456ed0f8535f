"""Adds ``map`` ops to a program, and chooses the memory layout of their results."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from popsim_torch.dtypes import dtype_name
from popsim_torch.ir import Tensor
from popsim_torch.ir.map_code import MapCode, MapValue
from popsim_torch.lowering.emit.builder import Builder, Place


def emit_map(
    builder: Builder,
    code: MapCode,
    result: MapValue,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    place: Place,
) -> Tensor:
    """Add a ``map`` op with one result.

    The result has the memory layout of its inputs of the same size, if they agree or if one of them
    is an image with channels last.
    """
    shape = tuple(int(size) for size in shape)
    read = [builder.graph.tensors[i] for i in code.inputs]
    sized = [tensor for tensor in read if tensor.shape == shape]
    order = _order_of(builder, sized, len(shape))
    permuted = tuple(shape[axis] for axis in order)
    inputs = [_with_order(builder, tensor, order, permuted) for tensor in read]
    out = builder.image(dtype, shape) if _has_image(builder, sized) else None
    written = builder.value(dtype, permuted) if out is None else builder.graph.root(out)
    code.results = [result]
    attributes = code.attributes()
    attributes["dtypes"] = [dtype_name(dtype)]
    attributes["shape"] = list(permuted)
    builder.op("map", inputs, [written], attributes, place=place)
    if out is not None or order == tuple(range(len(shape))):
        return out or written
    strides = [0] * len(shape)
    for axis, stride in zip(order, written.strides, strict=True):
        strides[axis] = stride
    return builder.graph.add_view(written, shape, strides, 0)


def _has_image(builder: Builder, sized: Sequence[Tensor]) -> bool:
    return any(builder.channels_last(tensor) is not None for tensor in sized)


def _order_of(builder: Builder, sized: Sequence[Tensor], rank: int) -> tuple[int, ...]:
    """Return the axes from the outermost in memory to the innermost."""
    if _has_image(builder, sized):
        return (0, 2, 3, 1)
    orders = {tensor.memory_order for tensor in sized}
    order = orders.pop() if len(orders) == 1 else None
    return tuple(range(rank)) if order is None else order


def _with_order(
    builder: Builder, tensor: Tensor, order: tuple[int, ...], permuted: tuple[int, ...]
) -> Tensor:
    """Return an input of an elementwise op with its axes in another order."""
    missing = len(order) - len(tensor.shape)
    if order == tuple(range(len(order))) or not tensor.shape:
        return tensor
    sizes, strides = (1,) * missing + tensor.shape, (0,) * missing + tensor.strides
    shape = tuple(sizes[axis] for axis in order)
    seen = tuple(strides[axis] for axis in order)
    root = builder.graph.root(tensor)
    if (root.shape, root.strides, 0) == (shape, seen, tensor.offset):
        return root
    return builder.graph.add_view(tensor, shape, seen, tensor.offset)


def cast(builder: Builder, tensor: Tensor, dtype: torch.dtype, place: Place) -> Tensor:
    """Return a tensor converted to another floating-point dtype; unchanged if it has it already."""
    if tensor.dtype == dtype:
        return tensor
    code = MapCode()
    return emit_map(builder, code, code.value(tensor), dtype, tensor.shape, place)
