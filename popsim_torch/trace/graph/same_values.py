"""Finds out whether two recorded nodes have the same value."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from popsim_torch.private_torch.operators import OpOverload, schema_of

__all__ = ["have_same_value"]


def have_same_value(one: torch.fx.Node, other: torch.fx.Node) -> bool:
    """Return whether two nodes are computed alike from the same nodes, which nothing changes.

    A tensor that changes in place between them may be another one: then the answer is no.
    """
    found: set[torch.fx.Node] = set()
    if one.graph is not other.graph or not _are_alike(one, other, found):
        return False
    if not found:
        return True
    node, last = min(found), max(found)
    while node is not last:
        if not _is_pure(node):
            return False
        node = node.next
    return True


def _are_alike(one: Any, other: Any, found: set[torch.fx.Node]) -> bool:
    """Compare arguments; add the nodes that are computed twice to a set."""
    if isinstance(one, torch.fx.Node):
        if one is other:
            return True
        if not isinstance(other, torch.fx.Node) or one.target is not other.target:
            return False
        if one.op != "call_function" or not (_is_pure(one) and _is_pure(other)):
            return False
        found |= {one, other}
        return _are_alike((one.args, one.kwargs), (other.args, other.kwargs), found)
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(_are_alike(value, other[key], found) for key, value in one.items())
        )
    if isinstance(one, (list, tuple)):
        return (
            isinstance(other, (list, tuple))
            and len(one) == len(other)
            and all(_are_alike(a, b, found) for a, b in zip(one, other, strict=True))
        )
    return type(one) is type(other) and bool(one == other)


def _is_pure(node: torch.fx.Node) -> bool:
    """Return whether a node changes nothing, and gives the same for the same operands."""
    if node.op != "call_function":
        return node.op in ("get_attr", "placeholder")
    target: Any = node.target
    return (
        isinstance(target, OpOverload)
        and not schema_of(target).is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
    )
