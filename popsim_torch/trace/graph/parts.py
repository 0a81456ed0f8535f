"""Keeps the operators that cut a tensor into parts while mutation is removed from a graph.

A view of a changed tensor is recomputed where it is read. Since 2.15, PyTorch recomputes a part of
``split`` or ``unbind`` with ``slice`` or ``select``; earlier versions use the original operator.
The results of a program are named after the original operator, under every version of PyTorch.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from popsim_torch.private_torch.operators import OpOverload, schema_of

aten = torch.ops.aten

_COPIES: dict[Any, Any] = {
    aten.split.Tensor: aten.split_copy.Tensor,
    aten.split_with_sizes.default: aten.split_with_sizes_copy.default,
    aten.unbind.int: aten.unbind_copy.int,
}
_TAKEN_BY = (aten.slice_copy.Tensor, aten.select_copy.int)


def is_view(node: torch.fx.Node) -> bool:
    """Return whether a node is a view of another node's memory."""
    if _is_part(node):
        return True
    return isinstance(node.target, OpOverload) and node.target.is_view


class Views:
    """Finds the views that lead to the nodes of a graph; visits each node once."""

    def __init__(self) -> None:
        self._last: dict[torch.fx.Node, torch.fx.Node | None] = {}
        self._has_part: dict[torch.fx.Node, bool] = {}

    def views_to(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """Return the views that lead to a node, the first one first and the node itself last."""
        views: list[torch.fx.Node] = []
        view = self._last_view(node)
        while view is not None:
            views.append(view)
            view = self._last_view(viewed(view))
        return views[::-1]

    def has_part(self, node: torch.fx.Node) -> bool:
        """Return whether one of the views of a node is a part of a tensor that was cut."""
        views: list[torch.fx.Node] = []
        view = self._last_view(node)
        while view is not None and view not in self._has_part:
            views.append(view)
            view = self._last_view(viewed(view))
        found = view is not None and self._has_part[view]
        for view in reversed(views):
            found = self._has_part[view] = found or _is_part(view)
        return found

    def _last_view(self, node: torch.fx.Node) -> torch.fx.Node | None:
        """Return the node, or the view that it changes in place; None if there is no view."""
        changes: list[torch.fx.Node] = []
        while node not in self._last and not is_view(node) and is_in_place(node):
            changes.append(node)
            node = viewed(node)
        last = self._last[node] if node in self._last else (node if is_view(node) else None)
        for change in (*changes, node):
            self._last[change] = last
        return last


def viewed(node: torch.fx.Node) -> torch.fx.Node:
    """Return the input of a view, or of an operator that changes it in place."""
    source: Any = node.args[0]
    return source.args[0] if _is_part(node) else source  # type: ignore[no-any-return]


def taken_parts(
    views: Sequence[torch.fx.Node], created: Sequence[torch.fx.Node]
) -> dict[torch.fx.Node, torch.fx.Node]:
    """Return the original part for each new node that recomputes a part with a slice.

    Args:
        views: The views that lead to the recomputed one.
        created: The new nodes for it; changes of its memory come first.
    """
    made = [node for node in created if node.target is not operator.getitem][-len(views) :]
    if len(made) != len(views):
        return {}
    return {
        node: view
        for node, view in zip(made, views, strict=True)
        if _is_part(view)
        and node.target in _TAKEN_BY
        and node.meta["val"].shape == view.meta["val"].shape
    }


def restore(node: torch.fx.Node, part: torch.fx.Node) -> None:
    """Make a node of the new graph use the original operator for its part."""
    cut, index = part.args
    source: Any = node.args[0]
    assert isinstance(cut, torch.fx.Node)
    with node.graph.inserting_before(node):
        target = _COPIES[cut.target]
        whole = node.graph.call_function(target, (source, *cut.args[1:]), cut.kwargs)
    value = source.meta["val"]
    with value.fake_mode:
        whole.meta = {**node.meta, "val": target(value, *cut.args[1:], **cut.kwargs)}
    node.target, node.args, node.kwargs = operator.getitem, (whole, index), {}


def _is_part(node: torch.fx.Node) -> bool:
    if node.target is not operator.getitem:
        return False
    cut = node.args[0]
    return isinstance(cut, torch.fx.Node) and cut.target in _COPIES


def is_in_place(node: torch.fx.Node) -> bool:
    """Return whether a node changes its first argument and returns that tensor."""
    if not isinstance(node.target, OpOverload):
        return False
    schema = schema_of(node.target)
    returns = schema.returns[0].alias_info if len(schema.returns) == 1 else None
    changed = schema.arguments[0].alias_info if schema.arguments else None
    return bool(returns and changed and returns.is_write and changed.is_write)
