"""Values in nested dicts, lists and tuples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = [
    "InList",
    "InTuple",
    "Path",
    "is_number",
    "is_truth",
    "leaves",
    "leaves_and_empty",
    "mapped",
    "number_kind",
    "path_name",
    "put",
]

Path = tuple[Any, ...]
"""The keys that lead to a value in nested containers."""


class InList(int):
    """A key of a path: a position in a list."""


class InTuple(int):
    """A key of a path: a position in a tuple."""


def is_number(value: object) -> bool:
    """Return whether a value is a number of Python's, or stands for one; truth values are not."""
    return isinstance(value, (int, float, torch.SymFloat)) and not isinstance(value, bool)


def is_truth(value: object) -> bool:
    """Return whether a value is a truth value of Python's, or stands for one."""
    return isinstance(value, (bool, torch.SymBool))


def number_kind(value: object) -> str:
    """Return ``bool``, ``int`` or ``float``; nothing for other values."""
    if is_truth(value):
        return "bool"
    return "" if not is_number(value) else "int" if isinstance(value, int) else "float"


def path_name(path: Path) -> str:
    """Return the name of a value in nested containers: its keys with dots in between."""
    return ".".join(map(str, path))


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield everything in nested dicts, lists and tuples that is none of these, with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        place = InList if isinstance(value, list) else InTuple
        for position, item in enumerate(value):
            yield from leaves(item, (*path, place(position)))
    else:
        yield path, value


def leaves_and_empty(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves of nested containers, and new containers in place of those without any."""
    if not isinstance(value, (dict, list, tuple)):
        yield path, value
    elif not value:
        yield path, type(value)() if type(value) in (dict, list, tuple) else value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves_and_empty(item, (*path, key))
    else:
        place = InList if isinstance(value, list) else InTuple
        for position, item in enumerate(value):
            yield from leaves_and_empty(item, (*path, place(position)))


def put(container: Any, path: Path, value: Any) -> Any:
    """Put a value into nested containers; those that are missing are made, tuples are made anew.

    Args:
        container: A dict, list or tuple; None for a new one.
        path: Where, from ``leaves``.
        value: The value.

    Returns:
        The container, or the one in its place.
    """
    if not path:
        return value
    key, *rest = path
    if container is None:
        container = [] if isinstance(key, InList) else () if isinstance(key, InTuple) else {}
    if isinstance(container, dict):
        found = dict.get(container, key)
        dict.__setitem__(container, key, put(found, tuple(rest), value))
        return container
    items = container if isinstance(container, list) else list(container)
    items += [None] * (key + 1 - len(items))
    items[key] = put(items[key], tuple(rest), value)
    return items if isinstance(container, list) else tuple(items)


def mapped(value: Any, function: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return a copy of nested containers with a function's results in place of the leaves."""
    if isinstance(value, dict):
        return {key: mapped(item, function, (*path, key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [mapped(item, function, (*path, i)) for i, item in enumerate(value)]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return function(path, value)
