"""What an element of a queue is made of: tensors in nested tuples, lists and dictionaries."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from popsim_torch.dtypes import INPUTS, dtype_name
from popsim_torch.errors import UsageTypeError
from popsim_torch.wrapper_tensors import is_wrapper

__all__ = ["Component", "Structure", "as_tensor", "check_dense", "describe", "flatten"]

Component = tuple[torch.dtype, tuple[int, ...]]
"""Element type and shape of one tensor of every element."""


@dataclass(frozen=True)
class Structure:
    """How the tensors of an element are put together.

    Attributes:
        container: A class of tuples, ``list`` or ``dict``; None for a single tensor.
        keys: Of a dictionary.
        parts: What is inside of the container, in order.
    """

    container: type | None = None
    keys: tuple[Any, ...] = ()
    parts: tuple[Structure, ...] = ()

    def build(self, leaves: Sequence[Any]) -> Any:
        """Return an element of these leaves, as many as there are tensors."""
        return self._build(iter(leaves))

    def _build(self, leaves: Iterator[Any]) -> Any:
        if self.container is None:
            return next(leaves)
        parts = [part._build(leaves) for part in self.parts]
        if self.container is dict:
            return dict(zip(self.keys, parts, strict=True))
        if self.container is list:
            return parts
        if self.container is tuple:
            return tuple(parts)
        return self.container(*parts)  # a named tuple

    def leaves_of(self, element: Any) -> list[Any] | None:
        """Return what is inside of the containers of an element that has exactly these.

        Args:
            element: To take apart. Its leaves are not looked at.
        """
        if self.container is None:
            return [element]
        kind: Any = type(element)
        if kind is not self.container or len(element) != len(self.parts):
            return None
        if self.container is dict and tuple(element) != self.keys:
            return None
        inside = list(element.values() if self.container is dict else element)
        leaves: list[Any] = []
        for part, one in zip(self.parts, inside, strict=True):
            if part.container is None:
                leaves.append(one)
                continue
            found = part.leaves_of(one)
            if found is None:
                return None
            leaves += found
        return leaves

    def paths(self, path: str = "") -> list[str]:
        """Return where each tensor is, such as ``['x'][0]``; a single tensor is at ``""``."""
        if self.container is None:
            return [path]
        names = self.keys if self.container is dict else range(len(self.parts))
        return [
            found
            for name, part in zip(names, self.parts, strict=True)
            for found in part.paths(f"{path}[{name!r}]")
        ]


def flatten(element: Any, where: str, like: Structure | None = None) -> tuple[Structure, list[Any]]:
    """Take an element apart.

    Args:
        element: A tensor, or a nest of tuples, lists and dictionaries.
        where: What the element is, for messages.
        like: A structure whose order of keys the element's dictionaries are read in.

    Returns:
        Its structure, and what its containers hold, in order; nothing there is looked at.

    Raises:
        UsageTypeError: There is nothing in it.
    """
    leaves: list[Any] = []
    structure = _flatten(element, leaves, like)
    if not leaves:
        raise UsageTypeError(
            f"{where} is {element!r}, which has no tensor in it. An element is a tensor, or a "
            "tuple, list or dictionary of tensors."
        )
    return structure, leaves


def _flatten(element: Any, leaves: list[Any], like: Structure | None) -> Structure:
    if isinstance(element, Mapping):
        keys = tuple(element.keys())
        if like is not None and keys != like.keys and set(keys) == set(like.keys):
            keys = like.keys
        return Structure(dict, keys, _flatten_all([element[key] for key in keys], leaves, like))
    if isinstance(element, (tuple, list)):
        kind: type = list if isinstance(element, list) else tuple
        if isinstance(element, tuple) and hasattr(element, "_fields"):
            kind = type(element)
        return Structure(kind, (), _flatten_all(element, leaves, like))
    leaves.append(element)
    return Structure()


def _flatten_all(
    parts: Sequence[Any], leaves: list[Any], like: Structure | None
) -> tuple[Structure, ...]:
    known = (
        like.parts if like is not None and len(like.parts) == len(parts) else [None] * len(parts)
    )
    return tuple(_flatten(part, leaves, one) for part, one in zip(parts, known, strict=True))


def as_tensor(leaf: Any, where: str) -> torch.Tensor:
    """Return a leaf of an element as a tensor; numbers and arrays become one.

    Args:
        leaf: What was found.
        where: What it is, for messages.

    Raises:
        UsageTypeError: It is nothing that the device could hold.
    """
    if isinstance(leaf, torch.Tensor):
        tensor = leaf
    elif isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "biuf":
        array = np.asarray(leaf)
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    elif isinstance(leaf, numbers.Real):
        tensor = torch.tensor(leaf, device="cpu")
    else:
        raise UsageTypeError(
            f"{where} is a {type(leaf).__name__}. Elements consist of tensors, arrays and numbers."
        )
    check_dense(tensor, where, "Elements are dense tensors.")
    if tensor.dtype not in INPUTS:
        raise UsageTypeError(
            f"{where} has the type {dtype_name(tensor.dtype)}, which the device does not have."
        )
    return tensor


def check_dense(tensor: torch.Tensor, where: str, rule: str) -> None:
    """Refuse a tensor that is nested or sparse, or consists of others.

    Args:
        tensor: Any.
        where: What it is, for messages.
        rule: What is needed, as a sentence.

    Raises:
        UsageTypeError: It is no dense tensor.
    """
    if tensor.is_nested:
        raise UsageTypeError(
            f"{where} is a nested tensor. {rule} Pad it with torch.nested.to_padded_tensor, or "
            "pass its values and offsets."
        )
    if tensor.layout is not torch.strided:
        raise UsageTypeError(f"{where} is {tensor.layout}. {rule} Call to_dense().")
    if is_wrapper(tensor):
        raise UsageTypeError(
            f"{where} is a {type(tensor).__name__}, which consists of other tensors. {rule} Pass "
            "these."
        )


def describe(components: Sequence[Component], structure: Structure) -> str:
    """Return an element's tensors as text, such as ``float32[8, 4] at ['x']``."""
    return ", ".join(
        f"{dtype_name(dtype)}{list(shape)}" + (f" at {path}" if path else "")
        for (dtype, shape), path in zip(components, structure.paths(), strict=True)
    )
