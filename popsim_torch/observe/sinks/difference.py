"""Where two runs differ, as data for a page."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from popsim_torch.observe.record import Record
from popsim_torch.observe.sinks.collected import spelt, thinned
from popsim_torch.observe.sinks.series import COLUMNS, label
from popsim_torch.statistics import Statistics

__all__ = ["difference"]

_Place = tuple[int, int]
"""Step and micro-batch."""
_Run = dict[str, dict[_Place, Statistics]]
_COMPARED = (
    *("count", "nans", "infs", *COLUMNS),
    *("zeros", "subnormals", "half_overflows", "half_underflows"),
)


def difference(records: Iterable[Record], other: Iterable[Record]) -> dict[str, Any]:
    """Return where the records of two runs differ: in words, and by tensor.

    Two records differ if their fingerprints do, or, if one has none, if any statistic that both
    have does.

    Returns:
        ``text``, and ``tensors`` in the order of the program: name, the first step that differs or
        None, the largest relative difference of the norms, and for each place that both runs have:
        ``x``, the norms ``here`` and ``there``, and their ``relative`` difference.
    """
    here, there = _by_place(records), _by_place(other)
    tensors = [_tensor(name, here[name], there[name]) for name in here if name in there]
    only = [len(set(here) - set(there)), len(set(there) - set(here))]
    return {"text": _text(tensors, only), "tensors": tensors}


def _by_place(records: Iterable[Record]) -> _Run:
    run: _Run = {}
    for record in records:
        place = (record.step, record.micro_batch or 0)
        run.setdefault(label(record), {})[place] = record.statistics
    return run


def _tensor(
    name: str, here: dict[_Place, Statistics], there: dict[_Place, Statistics]
) -> dict[str, Any]:
    places = [place for place in here if place in there]
    micro_batches = 1 + max((micro_batch for _, micro_batch in places), default=0)
    x = [step + micro_batch / micro_batches for step, micro_batch in places]
    norms = [(here[place].norm, there[place].norm) for place in places]
    relative = [_relative(*pair) for pair in norms]
    differ = [place for place in places if _differ(here[place], there[place])]
    known = [number for number in relative if number is not None]
    return {
        "name": name,
        "first": differ[0][0] if differ else None,
        "largest": spelt(max(known)) if known else None,
        "places": len(places),
        "x": thinned([spelt(place) for place in x]),
        "here": thinned([spelt(one) for one, _ in norms]),
        "there": thinned([spelt(two) for _, two in norms]),
        "relative": thinned([spelt(number) for number in relative]),
    }


def _differ(one: Statistics, other: Statistics) -> bool:
    if one.fingerprint is not None and other.fingerprint is not None:
        return one.fingerprint != other.fingerprint
    return any(not _equal(getattr(one, name), getattr(other, name)) for name in _COMPARED)


def _equal(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return True
    return one == other or (math.isnan(one) and math.isnan(other))


def _relative(one: float | None, other: float | None) -> float | None:
    """Return the difference of two norms over the larger one; None if one is not a number."""
    if one is None or other is None or not math.isfinite(one) or not math.isfinite(other):
        return None
    largest = max(abs(one), abs(other))
    return abs(one - other) / largest if largest else 0.0


def _text(tensors: list[dict[str, Any]], only: list[int]) -> str:
    if not tensors:
        return "The two runs have no tensor in common."
    differ = [one for one in tensors if one["first"] is not None]
    parts = []
    if differ:
        first = min(differ, key=lambda one: one["first"])
        parts.append(f"They first differ at step {first['first']}, in {first['name']}.")
        parts.append(f"{len(differ)} of {len(tensors)} common tensors differ.")
    elif not any(one["places"] for one in tensors):
        parts.append("The two runs have no step in common.")
    else:
        parts.append(f"All {len(tensors)} common tensors are equal at all common steps.")
    for number, run in zip(only, ("first", "second"), strict=True):
        if number:
            noun = "tensor is" if number == 1 else "tensors are"
            parts.append(f"{number} {noun} only in the {run} run.")
    return " ".join(parts)
