"""The filters that choose the keys of a ``MaybeOutfeedQueue``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from popsim_torch.errors import UsageTypeError, closest_names, example_names
from popsim_torch.tensors import Glob

__all__ = ["Filter", "Filters", "Glob", "process_filters"]


Filter: TypeAlias = str | Glob | re.Pattern[str]
"""A string, or a compiled regular expression, may match anywhere in a key."""


def process_filters(words: Iterable[str] | None) -> list[str] | None:
    """Return the filters for a list of words from a command line.

    Args:
        words: Filters; the single word ``none``, in upper or lower case, means no filtering.

    Returns:
        The words, or None to observe everything.
    """
    if words is None:
        return None
    found = [words] if isinstance(words, str) else list(words)
    return None if len(found) == 1 and found[0].lower() == "none" else found


class Filters:
    """A queue's filters.

    Args:
        filters: None takes every key, an empty list none, any other list the keys that at least one
            filter matches.

    Raises:
        UsageTypeError: ``filters`` is not a list, or a filter is neither a string nor a pattern.
    """

    def __init__(self, filters: Iterable[Filter] | None) -> None:
        if isinstance(filters, (str, Glob, re.Pattern)):
            raise UsageTypeError(
                f"MaybeOutfeedQueue: filters has to be a list of filters or None, got {filters!r}. "
                f"Pass [{filters!r}] for one filter."
            )
        try:
            self.given = None if filters is None else tuple(filters)
        except TypeError:
            raise UsageTypeError(
                "MaybeOutfeedQueue: filters has to be a list of filters or None, got a "
                f"{type(filters).__name__}."
            ) from None
        for position, one in enumerate(self.given or ()):
            is_text = isinstance(one, re.Pattern) and isinstance(one.pattern, str)
            if not isinstance(one, (str, Glob)) and not is_text:
                raise UsageTypeError(
                    f"MaybeOutfeedQueue: filter {position} is {one!r}. A filter is a string (part "
                    "of the key), a poptorch.Glob, or a regular expression from re.compile of a "
                    "string."
                )

    def take(self, key: str) -> bool:
        """Return whether to observe a key."""
        return self.given is None or any(_matches(one, key) for one in self.given)

    def idle(self, keys: Sequence[str]) -> list[Filter]:
        """Return the filters that match none of the keys."""
        return [one for one in self.given or () if not any(_matches(one, key) for key in keys)]


def _matches(one: Filter, key: str) -> bool:
    if isinstance(one, str):
        return one in key
    if isinstance(one, Glob):
        return one.matches(key)
    return one.search(key) is not None


def _words(one: Filter) -> str:
    return one if isinstance(one, str) else one.pattern


def near_keys(one: Filter, keys: Sequence[str]) -> list[str]:
    """Return the keys that are most similar to a filter, at most five."""
    return closest_names(_words(one), keys) or example_names(_words(one), keys)
