"""The structure of an element of a queue: tensors in nested tuples, lists and dictionaries."""

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
"""The dtype and shape of one tensor of every element."""


@dataclass(frozen=True)
class Structure:
    """The structure of an element: its containers, and where the tensors are in them.

    Attributes:
        container: A class of tuples, ``list`` or ``dict``; None for a single tensor.
        keys: The keys of a dictionary.
        parts: The structures inside of the container, in order.
    """

    container: type | None = None
    keys: tuple[Any, ...] = ()
    parts: tuple[Structure, ...] = ()

    def build(self, leaves: Sequence[Any]) -> Any:
        """Return an element with these leaves; there must be as many as tensors."""
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
        """Return the leaves of an element that has exactly these containers.

        Args:
            element: The element. Its leaves are not checked.
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
        """Return the path of each tensor, such as ``['x'][0]``; ``""`` for a single tensor."""
        if self.container is None:
            return [path]
        names = self.keys if self.container is dict else range(len(self.parts))
        return [
            found
            for name, part in zip(names, self.parts, strict=True)
            for found in part.paths(f"{path}[{name!r}]")
        ]


def flatten(element: Any, where: str, like: Structure | None = None) -> tuple[Structure, list[Any]]:
    """Split an element into its structure and its leaves.

    Args:
        element: A tensor, or nested tuples, lists and dictionaries.
        where: The description of the element, for messages.
        like: A structure whose order of keys is used to read the element's dictionaries.

    Returns:
        The structure, and the leaves in order, which are not checked.

    Raises:
        UsageTypeError: The element is empty.
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
    """Return a leaf of an element as a tensor; numbers and arrays are converted.

    Args:
        leaf: The leaf.
        where: The description of the leaf, for messages.

    Raises:
        UsageTypeError: The device cannot hold the leaf.
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
            f"{where} has the dtype {dtype_name(tensor.dtype)}, which the device does not support."
        )
    return tensor


def check_dense(tensor: torch.Tensor, where: str, rule: str) -> None:
    """Refuse a tensor that is nested or sparse, or consists of other tensors.

    Args:
        tensor: Any tensor.
        where: The description of the tensor, for messages.
        rule: The requirement, as a sentence.

    Raises:
        UsageTypeError: The tensor is not dense.
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
            "those tensors instead."
        )


def describe(components: Sequence[Component], structure: Structure) -> str:
    """Return a description of an element's tensors, such as ``float32[8, 4] at ['x']``."""
    return ", ".join(
        f"{dtype_name(dtype)}{list(shape)}" + (f" at {path}" if path else "")
        for (dtype, shape), path in zip(components, structure.paths(), strict=True)
    )
