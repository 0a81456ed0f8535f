"""Elements at positions that a run knows: looked up, or combined with others."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx

from popsim_torch.ir import Attribute, Tensor
from popsim_torch.lowering.emit.builder import Builder, Place, Value
from popsim_torch.lowering.rules.rule import FLOATING, Rule, all_filled

aten = torch.ops.aten

_POSITIONS = frozenset({torch.int32, torch.int64})


def _emit(
    builder: Builder,
    node: torch.fx.Node,
    tensors: tuple[Tensor, Tensor, Tensor],
    axis: int,
    place: Place,
    **settings: Attribute,
) -> Tensor:
    """Add a ``scatter_reduce`` op: its result has the shape and the dtype of the node's."""
    value = node.meta["val"]
    out = builder.value(value.dtype, value.shape)
    attributes: dict[str, Attribute] = {"axis": axis, "function": "sum", **settings}
    builder.op("scatter_reduce", tensors, [out], attributes, place=place)
    return out


def _scatter(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    """Lower ``scatter_add`` and ``scatter_reduce``: a position for each element."""
    arguments: Any = node.args
    x, axis, index, source = arguments[:4]
    tensors = builder.tensor(x), builder.tensor(index), builder.tensor(source)
    settings: dict[str, Attribute] = {}
    if len(arguments) > 4:
        settings["function"] = str(arguments[4])
        settings["include_self"] = bool(node.kwargs.get("include_self", True))
    axis = int(axis) % node.meta["val"].dim()
    return _emit(builder, node, tensors, axis, place, **settings)


def _index_add(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    """Lower ``index_add`` and ``index_reduce``: a position for each slice along the axis."""
    arguments: Any = node.args
    x, axis, index, source = arguments[:4]
    axis = int(axis) % node.meta["val"].dim()
    settings: dict[str, Attribute] = {}
    if len(arguments) > 4:
        settings["function"] = str(arguments[4])
        settings["include_self"] = bool(node.kwargs.get("include_self", True))
    values = builder.tensor(source)
    positions = _repeated(builder, builder.tensor(index), values, axis)
    return _emit(builder, node, (builder.tensor(x), positions, values), axis, place, **settings)


def _repeated(builder: Builder, index: Tensor, source: Tensor, axis: int) -> Tensor:
    """Return a view of positions along an axis that has the shape of ``source``."""
    strides = [0] * len(source.shape)
    strides[axis] = index.strides[0]
    return builder.graph.add_view(index, source.shape, strides, index.offset)


def _accumulate(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    """Lower ``index_put``, which adds up values for positions along one axis."""
    arguments: Any = node.args
    x, indices, values = arguments[:3]
    axis = _only_axis(indices)
    index = builder.contiguous(builder.tensor(indices[axis]), place)
    source = builder.tensor(values)
    count = math.prod(index.shape)
    if len(index.shape) != 1:
        source = builder.contiguous(source, place)
        shape = [*source.shape[:axis], count, *source.shape[axis + len(index.shape) :]]
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        source = builder.graph.add_view(source, shape, strides, source.offset)
        index = builder.graph.add_view(index, [count], [1], index.offset)
    positions = _repeated(builder, index, source, axis)
    return _emit(builder, node, (builder.tensor(x), positions, source), axis, place, wraps=True)


def _index(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    """Lower ``x[..., i, j, ...]`` with independent positions of neighbouring axes."""
    arguments: Any = node.args
    axes = _indexed_axes(arguments[1])
    indices = [builder.tensor(arguments[1][axis]) for axis in axes]
    if len(indices) > 1:
        indices = [_flat(builder, builder.contiguous(index, place)) for index in indices]
    return _take(builder, node, axes.start, indices, place, wraps=True)


def _index_select(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    arguments: Any = node.args
    axis = int(arguments[1]) % node.meta["val"].dim()
    return _take(builder, node, axis, [builder.tensor(arguments[2])], place, wraps=False)


def _take(
    builder: Builder,
    node: torch.fx.Node,
    axis: int,
    indices: list[Tensor],
    place: Place,
    *,
    wraps: bool,
) -> Tensor:
    value = node.meta["val"]
    x = builder.contiguous(builder.tensor(node.args[0]), place)
    out = builder.value(value.dtype, value.shape)
    attributes: dict[str, Attribute] = {"axis": axis, "wraps": wraps}
    builder.op("take_grid", [x, *indices], [out], attributes, place=place)
    return out


def _flat(builder: Builder, tensor: Tensor) -> Tensor:
    return builder.graph.add_view(tensor, [math.prod(tensor.shape)], [1], tensor.offset)


def _indexed_axes(indices: Any) -> range:
    """Return the axes with positions, if they are neighbours; otherwise an empty range."""
    given = [axis for axis, index in enumerate(indices) if index is not None]
    axes = range(given[0], given[-1] + 1) if given else range(0)
    return axes if len(axes) == len(given) else range(0)


def _index_supported(node: torch.fx.Node) -> bool:
    arguments: Any = node.args
    x, indices = arguments[:2]
    axes = _indexed_axes(indices)
    positions = [indices[axis].meta["val"] for axis in axes]
    return (
        bool(positions)
        and x.meta["val"].numel() > 0
        and all_filled(positions, _POSITIONS)
        and (len(positions) == 1 or _is_grid(positions))
    )


def _is_grid(positions: list[torch.Tensor]) -> bool:
    """Return whether the positions of each axis vary along one axis of the result, in order."""
    rank = len(positions)
    return all(
        tensor.dim() <= rank
        and all(
            size == 1 or axis == i for axis, size in enumerate(tensor.shape, rank - tensor.dim())
        )
        and tensor.dim() >= rank - i
        for i, tensor in enumerate(positions)
    )


def _index_select_supported(node: torch.fx.Node) -> bool:
    arguments: Any = node.args
    x, index = arguments[0].meta["val"], arguments[2].meta["val"]
    return x.dim() > 0 and x.numel() > 0 and index.dim() == 1 and all_filled([index], _POSITIONS)


def _only_axis(indices: Any) -> int:
    """Return the axis with positions; -1 if there are several."""
    given = [axis for axis, index in enumerate(indices) if index is not None]
    return given[0] if len(given) == 1 else -1


def _are_supported(x: Any, index: Any, source: Any) -> bool:
    tensors = [x.meta["val"], source.meta["val"]]
    return (
        all_filled(tensors, FLOATING)
        and tensors[0].dtype == tensors[1].dtype
        and tensors[0].dim() > 0
        and tensors[0].dim() == tensors[1].dim()
        and all_filled([index.meta["val"]], _POSITIONS)
    )


def _scatter_supported(node: torch.fx.Node) -> bool:
    arguments: Any = node.args
    x, axis, index, source = arguments[:4]
    shapes = [n.meta["val"].shape for n in (x, index, source)]
    return (
        _are_supported(x, index, source)
        and len(shapes[1]) == len(shapes[0])
        and len(arguments) == (5 if node.target is aten.scatter_reduce.two else 4)
        and all(
            count <= given and (axis % len(shapes[0]) == i or count <= most)
            for i, (most, count, given) in enumerate(zip(*shapes, strict=True))
        )
    )


def _index_add_supported(node: torch.fx.Node) -> bool:
    arguments: Any = node.args
    x, axis, index, source = arguments[:4]
    if not _are_supported(x, index, source) or node.kwargs.get("alpha", 1) != 1:
        return False
    return _fits(x.meta["val"].shape, index.meta["val"].shape, source.meta["val"].shape, axis, 1)


def _accumulate_supported(node: torch.fx.Node) -> bool:
    arguments: Any = (*node.args, False)
    x, indices, values, accumulate = arguments[:4]
    axis = _only_axis(indices)
    if not accumulate or axis < 0:
        return False
    tensors = [x.meta["val"], values.meta["val"]]
    index = indices[axis].meta["val"]
    return (
        all_filled(tensors, FLOATING)
        and tensors[0].dtype == tensors[1].dtype
        and all_filled([index], _POSITIONS)
        and _fits(tensors[0].shape, index.shape, tensors[1].shape, axis, index.dim())
    )


def _fits(x: torch.Size, index: torch.Size, source: torch.Size, axis: int, rank: int) -> bool:
    """Return whether the source has a slice of ``x`` for each position."""
    axis %= len(x)
    return len(index) == rank > 0 and source == (*x[:axis], *index, *x[axis + 1 :])


RULES: dict[Any, Rule] = {
    aten._unsafe_index.Tensor: Rule(_index, _index_supported),
    aten.index.Tensor: Rule(_index, _index_supported),
    aten.index_select.default: Rule(_index_select, _index_select_supported),
    aten.index_add.default: Rule(_index_add, _index_add_supported),
    aten.index_put.default: Rule(_accumulate, _accumulate_supported),
    aten.index_reduce.default: Rule(_index_add, _index_add_supported),
    aten.scatter_add.default: Rule(_scatter, _scatter_supported),
    aten.scatter_reduce.two: Rule(_scatter, _scatter_supported),
}
