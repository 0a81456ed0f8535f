"""All entries of the zoo."""

from __future__ import annotations

from benchmarks.zoo import language, vision, written
from benchmarks.zoo.entry import Entry

ENTRIES: tuple[Entry, ...] = (*vision.ENTRIES, *language.ENTRIES, *written.ENTRIES)


def find(name: str) -> Entry:
    """Return the entry with a name."""
    return next(entry for entry in ENTRIES if entry.name == name)
