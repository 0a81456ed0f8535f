"""Attributes of custom operators: their valid values, and their form in the ``custom`` op."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from popsim_torch.errors import Error, UsageValueError
from popsim_torch.ir import Attribute

__all__ = ["Value", "checked", "packed"]

Value = int | float | str | list[int] | list[float] | list[str]
"""One attribute."""

_KINDS: tuple[tuple[type, str], ...] = ((int, "int"), (float, "float"), (str, "str"))
_LARGEST = torch.finfo(torch.float32).max
_INTEGERS = torch.iinfo(torch.int64)


def checked(given: object) -> dict[str, Value]:
    """Check and return the attributes of a call of ``custom_op``, with lists for tuples.

    Args:
        given: The user's argument; None for no attributes.

    Raises:
        UsageValueError: The argument is not a dict, a key is not a string, a value has a wrong
            type, the elements of a list have no or several types, or a string is not ASCII.
        Error: A float is out of the range of float32.
    """
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise _wrong(f"attributes must be a dict, got {type(given).__name__}")
    return {_key(key): _value(key, value) for key, value in given.items()}


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise _wrong(f"the keys of attributes must be str, got {key!r}")
    return _text(f"the key {key!r} of attributes", key)


def _value(key: str, value: object) -> Value:
    if not isinstance(value, (list, tuple)):
        return _single(f"the attribute {key!r}", value)  # type: ignore[no-any-return]
    if not value:
        raise _wrong(f"the attribute {key!r} is empty: a list needs elements to have a type")
    items = [_single(f"an element of the attribute {key!r}", item) for item in value]
    if len({_kind(item) for item in items}) > 1:
        kinds = ", ".join(sorted({type(item).__name__ for item in items}))
        raise _wrong(f"the elements of the attribute {key!r} must have one type, got {kinds}")
    return items


def _single(what: str, value: object) -> Any:
    if isinstance(value, int):
        if not _INTEGERS.min <= value <= _INTEGERS.max:
            raise _wrong(f"{what} is {value}, which has more than 64 bits")
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value) and abs(value) > _LARGEST:
            side = "high" if value > 0 else "low"
            raise Error(
                f"custom_op: {what} is {value}, which is too {side} for a Popart float attribute: "
                f"those are float32, up to {_LARGEST:g} in size."
            )
        return float(value)
    if isinstance(value, str):
        return _text(what, value)
    raise _wrong(f"{what} must be an int, a float, a str, or a list of these, got {value!r:.100}")


def _text(what: str, text: str) -> str:
    if not text.isascii() or "\0" in text:
        raise _wrong(f"{what} must be ASCII text, got {text!r:.100}")
    return text


def _wrong(problem: str) -> UsageValueError:
    return UsageValueError(f"custom_op: {problem}.")


def _kind(value: object) -> str:
    return next(name for kind, name in _KINDS if isinstance(value, kind))


def packed(attributes: Mapping[str, Value]) -> dict[str, Attribute]:
    """Return the attributes of the ``custom`` op that hold those of a custom operator.

    Args:
        attributes: Checked.
    """
    layouts: list[str] = []
    values: dict[str, list[Any]] = {"int": [], "float": [], "str": []}
    for name, value in attributes.items():
        items: list[Any] = value if isinstance(value, list) else [value]
        kind = _kind(items[0])
        layouts.append(f"{kind} {len(items) if isinstance(value, list) else '-'} {name}")
        values[kind] += items
    return {
        "attributes": layouts,
        "ints": values["int"],
        "floats": values["float"],
        "strings": values["str"],
    }
