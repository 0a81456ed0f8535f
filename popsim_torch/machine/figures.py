"""Simulated figures as text: never with more digits than the model of the machine is good for."""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["GRADES", "amount", "count", "grade_of", "percent", "shares", "size", "time"]

GRADES = {"A": "published", "B": "fitted", "C": "assumed", "": "no formula"}
"""What the grades of formulas mean; the empty one belongs to ops that count as no time."""
_STEPS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def rounded(value: float, digits: int) -> str:
    """Return a number with some significant digits, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    value = _cut(value, digits)
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{max(places, 0)}f}"


def _cut(value: float, digits: int) -> float:
    """Return a number without the digits after the first ones."""
    return float(f"{value:.{digits - 1}e}")


def amount(value: float | None, grade: str = "B") -> str:
    """Return cycles or operations, such as ``1.2 M``: two digits, one if the formula is assumed."""
    return _scaled(value, _STEPS, 1 if grade == "C" else 2)


def time(seconds: float | None, grade: str = "B") -> str:
    """Return a simulated time, such as ``1.2 ms``: two digits, one if the formula is assumed."""
    if seconds is None:
        return "-"
    digits = 1 if grade == "C" else 2
    seconds = _cut(seconds, digits)
    for step, unit in _SECONDS:
        if abs(seconds) >= step:
            return f"{rounded(seconds / step, digits)} {unit}"
    return f"{rounded(seconds / 1e-9, digits)} ns"


def size(num_bytes: float | None) -> str:
    """Return bytes, such as ``1.25 MiB``: three digits, as tensors have exact sizes."""
    return _scaled(num_bytes, _BYTES, 3, "B")


def percent(share: float) -> str:
    """Return a share, such as ``25 %`` or ``0.3 %``."""
    return f"{rounded(100 * share, 1 if abs(share) < 0.1 else 2)} %"


def count(number: int, noun: str) -> str:
    """Return ``1 op`` or ``2 ops``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _scaled(
    value: float | None, steps: tuple[tuple[float, str], ...], digits: int, unit: str = ""
) -> str:
    if value is None:
        return "-"
    near = max(abs(value), abs(_cut(value, digits)))
    for step, name in steps:
        if near >= step:
            return f"{rounded(value / step, digits)} {name}"
    whole = rounded(value, digits) if abs(value) < 1000 else f"{value:.0f}"
    return f"{whole} {unit}".rstrip()


def grade_of(cycles_by_grade: Mapping[str, float]) -> str:
    """Return the worst grade of a sum of which it makes up a tenth or more; ``C`` if there is none.

    Args:
        cycles_by_grade: The cycles of the sum by grade.
    """
    total = sum(cycles_by_grade.values())
    for grade in ("C", "B", "A"):
        if total and cycles_by_grade.get(grade, 0.0) >= 0.1 * total:
            return grade
    return "C"


def shares(grades: Mapping[str, float]) -> str:
    """Return the shares of the grades: ``A 70 %, B 20 %, C 10 %``."""
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in grades.items())
