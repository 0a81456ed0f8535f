"""The kinds of a call's arguments; equal kinds mean that a recording can serve the call."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from popsim_torch.loops.argument_iterators import is_fed
from popsim_torch.private_torch.trees import TreeSpec, tree_flatten, tree_is_leaf
from popsim_torch.wrapper_tensors import is_wrapper

__all__ = ["IteratorKind", "apart", "iterators_of", "kind_of"]

_LEAVES = {torch.Tensor, nn.Parameter, bool, int, float, complex, str, bytes, type(None)}


def apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec]:
    """Return the leaves in a call's arguments, and their structure."""
    # The fast path: arguments that are no containers. The general path is slow.
    if not kwargs and (_LEAVES.issuperset(map(type, args)) or all(map(tree_is_leaf, args))):
        return list(args), _in_a_row(len(args))
    return tree_flatten((args, kwargs))


@functools.cache
def _in_a_row(count: int) -> TreeSpec:
    """Return the structure of a call with ``count`` arguments that are no containers."""
    return tree_flatten(((None,) * count, {}))[1]


def kind_of(leaf: Any) -> Any:
    """Return the kind of an argument; a recording can serve other arguments of an equal kind."""
    if isinstance(leaf, torch.Tensor):
        if leaf.is_nested or is_wrapper(leaf):
            return _Identity(leaf)  # no recording serves another one
        return ("tensor", tuple(leaf.shape), leaf.dtype)
    if isinstance(leaf, (bool, int, float, complex, str, bytes, type(None))):
        return (type(leaf), leaf)
    if is_fed(leaf):
        return IteratorKind(type(leaf))
    return _Identity(leaf)


@dataclass(frozen=True)
class IteratorKind:
    """An iterator of any class, and which other arguments are the same iterator.

    Attributes:
        kind: Its class.
        first: The place of the first argument that is the same iterator.
    """

    kind: type
    first: int = 0


def iterators_of(leaves: Sequence[Any], key: list[Any]) -> list[Iterator[Any]]:
    """Return the iterators among arguments; write to the key which of them are the same."""
    found: dict[int, int] = {}
    iterators = []
    for place, (leaf, kind) in enumerate(zip(leaves, key, strict=True)):
        if type(kind) is IteratorKind:
            key[place] = replace(kind, first=found.setdefault(id(leaf), place))
            iterators.append(leaf)
    return iterators


@dataclass(frozen=True, eq=False)
class _Identity:
    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)
