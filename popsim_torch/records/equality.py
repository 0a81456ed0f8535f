"""Whether two statistics of one tensor are of the same values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from popsim_torch.statistics import Statistics

__all__ = ["Outcome", "default_tolerance", "narrower", "norm_difference", "same", "ulp_distance"]

_MOMENTS = ("mean", "std", "minimum", "maximum", "norm", "absolute_mean")
_ARRAYS = ("samples", "top_values")
_TOLERANCES = {torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}
_USUAL_TOLERANCE = 1e-5
_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


@dataclass(frozen=True)
class Outcome:
    """The result of a comparison.

    Attributes:
        equal: Whether the values are the same, as far as the statistics can say; None if they have
            nothing in common that could be compared.
        by_bits: Whether fingerprints decided, and not numbers within a tolerance.
        reason: What differs; empty if nothing does.
    """

    equal: bool | None
    by_bits: bool = False
    reason: str = ""


def same(a: Statistics, b: Statistics, *, exact: bool, tolerance: float) -> Outcome:
    """Compare two statistics.

    Equal fingerprints are equal values. Without fingerprints, or if these differ and not every bit
    counts, the counts of NaN and infinities must be equal, and moments, samples and the largest
    values within the tolerance: relative to the larger of the two numbers, and of the root mean
    square of the tensor.

    Args:
        a: Statistics of one run.
        b: Statistics of the other run.
        exact: Whether every bit counts, if both have a fingerprint.
        tolerance: The tolerance, relative.
    """
    if a.count != b.count:
        return Outcome(False, reason=f"{a.count} values and {b.count} values")
    if a.fingerprint is not None and b.fingerprint is not None:
        if a.fingerprint == b.fingerprint:
            return Outcome(True, by_bits=True)
        if exact:
            return Outcome(False, by_bits=True, reason="the bits differ")
    for name in ("nans", "infs"):
        if getattr(a, name) != getattr(b, name):
            word = "NaN" if name == "nans" else "infinities"
            return Outcome(False, reason=f"{getattr(a, name)} and {getattr(b, name)} {word}")
    scale = max(_root_mean_square(a), _root_mean_square(b))
    worst, reason, compared = 0.0, "", False
    for name, one, other in _numbers(a, b):
        compared = True
        difference = _difference(one, other, scale if name != "norm" else 0.0)
        if difference > max(worst, tolerance):
            worst = difference
            reason = (
                f"{name} {one:.6g} and {other:.6g}: the relative difference {difference:.2g} is "
                f"above {tolerance:.2g}"
            )
    if not compared and a.count != a.nans + a.infs:
        return Outcome(None)
    return Outcome(not reason, reason=reason)


def _numbers(a: Statistics, b: Statistics) -> Iterator[tuple[str, float, float]]:
    """Yield the numbers that both have, with what they are."""
    for name in _MOMENTS:
        one, other = getattr(a, name), getattr(b, name)
        if one is not None and other is not None:
            yield name, one, other
    for name in _ARRAYS:
        ones, others = getattr(a, name), getattr(b, name)
        if ones is None or others is None or len(ones) != len(others):
            continue
        for i, (one, other) in enumerate(zip(ones.tolist(), others.tolist(), strict=True)):
            yield f"{name}[{i}]", one, other


def _root_mean_square(one: Statistics) -> float:
    finite = one.count - one.nans - one.infs
    if one.norm is not None and finite and math.isfinite(one.norm):
        return one.norm / math.sqrt(finite)
    if one.samples is not None:
        numbers = one.samples[one.samples.isfinite()]
        if len(numbers):
            return float(numbers.square().mean().sqrt())
    return 0.0


def _difference(one: float, other: float, scale: float) -> float:
    """Return the relative difference of two numbers, which is infinite for NaN and a number."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not math.isfinite(one) or not math.isfinite(other):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other), scale)


def norm_difference(a: Statistics, b: Statistics) -> float | None:
    """Return the relative difference of the norms, or of the samples if there are no norms.

    Returns:
        The difference; infinite if only one of them has NaN or infinities; None without numbers.
    """
    if (a.nans, a.infs) != (b.nans, b.infs):
        return math.inf
    if a.norm is not None and b.norm is not None:
        return _difference(a.norm, b.norm, 0.0)
    if a.samples is None or b.samples is None or len(a.samples) != len(b.samples):
        return None
    known = a.samples.isfinite() & b.samples.isfinite()
    ones, others = a.samples[known], b.samples[known]
    larger = max(float(ones.norm()), float(others.norm()))
    return float((ones - others).norm()) / larger if larger else 0.0


def default_tolerance(a: torch.dtype | None, b: torch.dtype | None) -> float:
    """Return the tolerance for two dtypes, relative: 2^-8 for float16, else 1e-5.

    bfloat16 has 2^-5.
    """
    return _TOLERANCES.get(narrower(a, b) or torch.float32, _USUAL_TOLERANCE)


def narrower(a: torch.dtype | None, b: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of two that has fewer digits; None if no floating-point dtype is known."""
    known = [one for one in (a, b) if one is not None and one.is_floating_point]
    return max(known, key=lambda one: torch.finfo(one).eps) if known else None


def ulp_distance(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> tuple[int, int] | None:
    """Return the largest distance of two tensors' numbers, and where it is.

    The distance is in units in the last place: the number of steps from one number of the dtype to
    the next.

    Args:
        a: float64, one axis.
        b: The same for the other tensor.
        dtype: The dtype in which to count.

    Returns:
        The distance, and the index of the pair of numbers; pairs with NaN are left out. None if
        there are no pairs, or the dtype has no such steps.
    """
    if dtype not in _BITS or len(a) != len(b):
        return None
    places = [_place(numbers, dtype) for numbers in (a, b)]
    known = (~(a.isnan() | b.isnan())).tolist()
    distances = [
        (abs(one - other), -i)
        for i, (one, other, is_known) in enumerate(zip(*places, known, strict=True))
        if is_known
    ]
    if not distances:
        return None
    distance, index = max(distances)
    return distance, -index


def _place(numbers: torch.Tensor, dtype: torch.dtype) -> list[int]:
    """Return the places of numbers in the order of all numbers of a dtype; 0.0 has place 0."""
    bits = numbers.to(dtype).view(_BITS[dtype]).tolist()
    lowest = -(1 << (8 * dtype.itemsize - 1))
    return [one if one >= 0 else lowest - one for one in bits]
