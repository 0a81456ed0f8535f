"""Operators whose result is a view of their input's memory: no work on the device."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.fx

from popsim_torch.ir import Tensor
from popsim_torch.ir.graph import contiguous_strides
from popsim_torch.lowering.emit.builder import Builder, Place, Value
from popsim_torch.lowering.rules.rule import Family, Rule
from popsim_torch.private_torch.operators import OpOverload, opname, overload_name, schema_of
from popsim_torch.trace.graph.markers import MARK

aten = torch.ops.aten

# These copy in eager PyTorch; here no tensor is changed in place, so a view is enough.
_SAME_TENSOR = frozenset(
    {
        MARK,
        aten.alias.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.detach.default,
        aten.lift_fresh.default,
        aten.lift_fresh_copy.default,
    }
)
_AS_VIEW = {
    aten._unsafe_view.default: aten.view.default,
    aten._reshape_copy.default: aten.view.default,
}
# Their results are no plain memory: they read memory as another dtype, or with a pending operation
# on each number. The program has views of another dtype only for complex numbers as pairs.
_REINTERPRETING = frozenset({aten.view.dtype, aten.view_copy.dtype})
_PENDING = frozenset({"_conj", "_neg_view"})
_COPY = "_copy"


@functools.cache
def _viewing(target: OpOverload) -> OpOverload | None:
    """Return the view operator with the values of ``target``: ``view`` for ``view_copy``."""
    if target in _AS_VIEW:
        return _AS_VIEW[target]
    name, overload = opname(target), overload_name(target)
    packet = getattr(aten, name.removesuffix(_COPY), None) if name.endswith(_COPY) else None
    viewing: OpOverload | None = getattr(packet, overload, None)
    if viewing is None or schema_of(viewing).returns[0].alias_info is None:
        return None
    return viewing


def _is_view_operator(target: OpOverload) -> bool:
    if target in _REINTERPRETING or opname(target).removesuffix(_COPY) in _PENDING:
        return False
    if target in _SAME_TENSOR or _viewing(target) is not None:
        return True
    schema = schema_of(target)
    return (
        not schema.is_mutable and bool(schema.returns) and schema.returns[0].alias_info is not None
    )


def keeps_type(node: torch.fx.Node) -> bool:
    """Return whether a conversion converts to the dtype that its tensor already has."""
    source: Any = node.args[0]
    same: bool = source.meta["val"].dtype == node.meta["val"].dtype
    return same


def is_view(node: torch.fx.Node) -> bool:
    """Return whether a node's results share memory with its first argument."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    return _is_view_operator(target) or (target is aten._to_copy.default and keeps_type(node))


def lower_view(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    """Return the view (or views) for a node; copy the input first if no view is possible."""
    source = builder.tensor(node.args[0])
    if node.target in _SAME_TENSOR:
        return another_name(builder, source)
    target: Any = node.target
    target = _viewing(target) or target
    if target is aten.as_strided.default:
        return _strided(builder, node, source, place)
    try:
        seen = target(_layout_of(builder, source), *node.args[1:], **node.kwargs)
    except RuntimeError:
        # Not possible in this layout (a view of a transposed tensor): use a contiguous copy.
        source = _copied(builder, source, place)
        seen = target(_layout_of(builder, source), *node.args[1:], **node.kwargs)
    if isinstance(seen, (list, tuple)):
        return [_as_tensor(builder, source, item) for item in seen]
    return _as_tensor(builder, source, seen)


def _strided(builder: Builder, node: torch.fx.Node, source: Tensor, place: Place) -> Tensor:
    """Return the view of ``as_strided``, whose offset counts in the memory that PyTorch uses."""

    def arguments(
        x: Any, size: Any, stride: Any, storage_offset: int | None = None
    ) -> tuple[Any, Any, Any, int]:
        begin: int = x.meta["val"].storage_offset()
        return x, size, stride, 0 if storage_offset is None else storage_offset - begin

    given: Any = node.args, node.kwargs
    x, size, stride, offset = arguments(*given[0], **given[1])
    if x.meta["val"].stride() != source.strides:
        source = with_traced_layout(builder, x, source, place)
    return builder.graph.add_view(source, size, stride, source.offset + offset)


def _copied(builder: Builder, source: Tensor, place: Place) -> Tensor:
    """Return a contiguous copy of a tensor that is at an even place in its memory."""
    if not source.is_contiguous or source.offset % 2 == 0:
        return builder.contiguous(source, place)
    copy = builder.value(source.dtype, source.shape)
    builder.op("copy", [source], [copy], place=place)
    return copy


def another_name(builder: Builder, source: Tensor) -> Tensor:
    """Return a view of a whole tensor, which can have another name."""
    return builder.graph.add_view(source, source.shape, source.strides, source.offset)


def _layout_of(builder: Builder, tensor: Tensor) -> torch.Tensor:
    """Return a tensor without data and with the memory layout of ``tensor``."""
    root = builder.graph.root(tensor)
    size = 1
    for length in root.shape:
        size *= length
    size = size * root.dtype.itemsize // tensor.dtype.itemsize
    memory = torch.empty(size, dtype=tensor.dtype, device="meta")
    return memory.as_strided(tensor.shape, tensor.strides, tensor.offset)


def _as_tensor(builder: Builder, source: Tensor, seen: torch.Tensor) -> Tensor:
    offset = int(seen.storage_offset())
    return builder.graph.add_view(source, seen.shape, seen.stride(), offset, dtype=seen.dtype)


def with_traced_layout(
    builder: Builder, source: torch.fx.Node, tensor: Tensor, place: Place
) -> Tensor:
    """Give a tensor its strides in PyTorch, which some operators refer to.

    Args:
        builder: The graph under construction.
        source: The node of the tensor.
        tensor: The tensor.
        place: The place of a copy.
    """
    traced = source.meta["val"]
    if traced.stride() == tensor.strides and tensor.offset == 0:
        return tensor
    extent = 1 + sum(
        (size - 1) * stride for size, stride in zip(traced.shape, traced.stride(), strict=True)
    )
    if traced.stride() == contiguous_strides(traced.shape):
        whole = builder.contiguous(tensor, place)
        if whole.offset == 0:
            return whole
    memory = builder.value(tensor.dtype, (extent,))
    view = builder.graph.add_view(memory, traced.shape, traced.stride(), 0)
    builder.op("copy", [tensor], [view], place=place)
    return view


VIEWS = Family(_is_view_operator, Rule(lower_view))
