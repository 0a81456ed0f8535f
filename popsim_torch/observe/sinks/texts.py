"""Numbers and names as short texts, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["cut", "plural", "printable", "short_number", "sparkline"]

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = ".:-=+*#@"


def plural(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``2 tensors``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def printable(text: str) -> str:
    """Return text without characters that would control the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def cut(name: str, width: int) -> str:
    """Return a name, or its beginning and its end if it is longer than some width."""
    if len(name) <= width:
        return name
    end = (width - 1) * 2 // 3
    return f"{name[: width - 1 - end]}~{name[len(name) - end :]}"


def short_number(number: float | None) -> str:
    """Return a number with three significant digits; a dash if there is none."""
    return "-" if number is None else f"{number:.3g}"


def sparkline(
    values: Sequence[float], ascii_only: bool = False, span: tuple[float, float] | None = None
) -> str:
    """Return numbers as a row of small bars; ``!`` for one that is not finite.

    Args:
        values: The numbers.
        ascii_only: Whether the bars are ASCII characters, for terminals that have no others.
        span: The numbers of the lowest and the highest bar; by default those of the values.
    """
    bars = _ASCII_BARS if ascii_only else _BARS
    finite = [value for value in values if math.isfinite(value)]
    low, high = span or (min(finite, default=0.0), max(finite, default=0.0))
    top = len(bars) - 1

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return "!"
        if high == low:
            return bars[0]
        return bars[min(top, int((value / 2 - low / 2) / (high / 2 - low / 2) * (top + 1)))]

    return "".join(map(bar, values))
