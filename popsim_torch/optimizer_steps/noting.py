"""Dicts that note what is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["NotingDict"]


class NotingDict(dict[Any, Any]):
    """A dict that knows which entries a step has read: a group, or a dict of the optimizer.

    Attributes:
        read: The keys that were read or looked for before the step set them.
    """

    def __init__(self, entries: Mapping[Any, Any]) -> None:
        super().__init__(entries)
        self.read: set[Any] = set()
        self._set: set[Any] = set()

    def _note(self, *keys: Any) -> None:
        self.read |= set(keys) - self._set

    def __getitem__(self, key: Any) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self._note(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Any]:
        self._note(*super().keys())
        return super().__iter__()

    def __setitem__(self, key: Any, value: Any) -> None:
        self._set.add(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._note(key)
        super().__delitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return an entry, or else the default."""
        self._note(key)
        return super().get(key, default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return an entry; add it if it is missing."""
        self._note(key)
        return super().setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove an entry and return it."""
        self._note(key)
        return super().pop(key, *default)

    def keys(self) -> Any:
        """Return the keys."""
        self._note(*super().keys())
        return super().keys()

    def values(self) -> Any:
        """Return the values."""
        self._note(*super().keys())
        return super().values()

    def items(self) -> Any:
        """Return the entries."""
        self._note(*super().keys())
        return super().items()
