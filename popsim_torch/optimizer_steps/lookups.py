"""Notes which attributes a step looks for that its optimizer does not have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = ["missing_lookups"]


@contextlib.contextmanager
def missing_lookups(kind: Any) -> Iterator[set[str]]:
    """Note the names of missing attributes that are looked for while the context lasts.

    Args:
        kind: The class of the optimizer; nothing is noted if it answers for missing attributes.
    """
    names: set[str] = set()
    if hasattr(kind, "__getattr__"):
        yield names
        return

    def missing(self: object, name: str) -> Any:
        names.add(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    kind.__getattr__ = missing
    try:
        yield names
    finally:
        del kind.__getattr__
