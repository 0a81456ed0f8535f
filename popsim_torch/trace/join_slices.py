"""Concatenates the gradients of a tensor's parts instead of adding them.

PyTorch's gradient of ``x[i]`` or of ``x[a:b]`` has the size of ``x``, with zeros around the
gradient of the part; then the gradients of all parts are added. If the parts cover ``x``, and each
element is in one of them, the sum is their concatenation.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

aten = torch.ops.aten


@dataclass(frozen=True)
class _Part:
    """The part of a gradient that a node adds: elements ``[start, end)`` along one axis."""

    gradient: torch.fx.Node
    shape: tuple[int, ...]
    axis: int
    start: int
    end: int
    selected: bool  # the gradient has no such axis


def join_slices(graph: torch.fx.Graph) -> int:
    """Replace sums of ``select_backward`` and ``slice_backward`` by ``cat``, in place.

    Args:
        graph: A graph without mutation; every node has its ``meta["val"]``.

    Returns:
        The number of sums replaced.
    """
    joined = 0
    for node in list(graph.nodes):
        if not _is_sum(node) or any(map(_is_sum, node.users)):
            continue
        parts = _parts_of(node)
        if parts is not None and _tile(parts):
            _replace(graph, node, sorted(parts, key=operator.attrgetter("start")))
            joined += 1
    return joined


def _is_sum(node: torch.fx.Node) -> bool:
    return (
        node.target is aten.add.Tensor
        and not node.kwargs
        and all(isinstance(argument, torch.fx.Node) for argument in node.args)
    )


def _parts_of(node: torch.fx.Node) -> list[_Part] | None:
    """Return the parts that a sum adds; None if there are other terms than gradients of parts."""
    parts: list[_Part] = []
    todo: list[Any] = list(node.args)
    while todo:
        term = todo.pop()
        if len(term.users) != 1:
            return None
        if _is_sum(term):
            todo.extend(term.args)
            continue
        part = _part_of(term)
        if part is None:
            return None
        parts.append(part)
    return parts


def _part_of(node: torch.fx.Node) -> _Part | None:
    if node.target not in (aten.select_backward.default, aten.slice_backward.default):
        return None
    arguments: Any = node.args
    gradient, _, axis, *position = arguments
    shape = tuple(node.meta["val"].shape)
    axis %= len(shape)
    size = shape[axis]
    if node.target is aten.select_backward.default:
        index = position[0] % size
        return _Part(gradient, shape, axis, index, index + 1, selected=True)
    start, end, step = position
    start, end, step = slice(start, end, step).indices(size)
    if step != 1 or end <= start:
        return None
    return _Part(gradient, shape, axis, start, end, selected=False)


def _tile(parts: list[_Part]) -> bool:
    """Return whether the parts cover one tensor along one axis, without gap or overlap."""
    if len({(part.shape, part.axis) for part in parts}) != 1:
        return False
    position = 0
    for part in sorted(parts, key=operator.attrgetter("start")):
        if part.start != position:
            return False
        position = part.end
    return position == parts[0].shape[parts[0].axis]


def _replace(graph: torch.fx.Graph, node: torch.fx.Node, parts: list[_Part]) -> None:
    axis = parts[0].axis
    with graph.inserting_before(node):
        pieces = []
        for part in parts:
            piece = part.gradient
            if part.selected:
                value = piece.meta["val"]
                piece = graph.call_function(aten.unsqueeze.default, (piece, axis))
                piece.meta = dict(node.meta)
                with value.fake_mode:
                    piece.meta["val"] = value.unsqueeze(axis)
            pieces.append(piece)
        joined = graph.call_function(aten.cat.default, (pieces, axis))
        joined.meta = dict(node.meta)
    node.replace_all_uses_with(joined)
    _erase(graph, node)


def _erase(graph: torch.fx.Graph, term: torch.fx.Node) -> None:
    """Remove an unused sum from the graph, with its terms."""
    arguments: Any = term.args if _is_sum(term) else ()
    graph.erase_node(term)
    for argument in arguments:
        _erase(graph, argument)
