"""Remembers what is in lists, dicts and sets of the user, to compare and restore it."""

from __future__ import annotations

from collections import deque
from typing import Any

__all__ = ["CONTAINERS", "MOST", "Content", "are_other_numbers", "items_in"]

MOST = 1000
"""Longer lists and dicts are data: what is in their items is not remembered."""
_CHANGEABLE = (dict, list, deque, set)
CONTAINERS = (*_CHANGEABLE, tuple)


def items_in(value: Any) -> list[Any]:
    """Return the items of a list, tuple or set, or the values of a dict; none of other objects."""
    # (a proxy or mock of a dict poses as one: its type tells that it is none)
    kind = type(value)
    if issubclass(kind, dict):
        return list(dict.values(value))
    return list(value) if issubclass(kind, (list, tuple, deque, set, frozenset)) else []


def are_other_numbers(then: Any, now: Any) -> bool:
    """Return whether two values are numbers, and not the same one."""
    if not (issubclass(type(then), (int, float)) and issubclass(type(now), (int, float))):
        return False
    is_nan = then != then and now != now
    return bool(then != now) and not is_nan


class Content:
    """The items of a list, dict or set at one time, and of those in it.

    Args:
        value: Any value.
    """

    def __init__(self, value: Any) -> None:
        self._value = value
        # By id (they may be in a cycle): the object, and a dict or list of its items.
        self._items: dict[int, tuple[Any, Any]] = {}
        todo = [value]
        while todo:
            one = todo.pop()
            kind = type(one)
            if id(one) in self._items or not issubclass(kind, CONTAINERS):
                continue
            items: Any = dict(one) if issubclass(kind, dict) else list(one)
            self._items[id(one)] = one, items
            todo += items_in(items) if len(items) <= MOST else []

    def restore(self) -> None:
        """Give each list, dict and set its items again."""
        for one, items in self._items.values():
            if issubclass(type(one), _CHANGEABLE):
                one.clear()
                (one.update if issubclass(type(one), (dict, set)) else one.extend)(items)

    def had(self, key: Any) -> bool:
        """Return whether it is a dict that had a key."""
        return key in self._items[id(self._value)][1]

    def has_other_numbers(self) -> bool:
        """Return whether entries that were numbers are other numbers now."""
        pairs = [(self._value, self._value)]
        seen = set[tuple[int, int]]()
        while pairs:
            then, now = pairs.pop()
            if are_other_numbers(then, now):
                return True
            if id(then) in self._items and (id(then), id(now)) not in seen:
                seen.add((id(then), id(now)))
                pairs += self._pairs(self._items[id(then)][1], now)
        return False

    def _pairs(self, items: Any, now: Any) -> list[tuple[Any, Any]]:
        """Return the former and present items that may differ."""
        if isinstance(items, dict):
            present = now if issubclass(type(now), dict) else {}
            pairs = [(one, present[key]) for key, one in items.items() if key in present]
        else:
            is_list = issubclass(type(now), (list, tuple, deque))
            pairs = list(zip(items, now, strict=False)) if is_list else []
        return [(a, b) for a, b in pairs if a is not b or id(a) in self._items]
