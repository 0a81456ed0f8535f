"""A difference of two runs as a text of about 20 lines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from popsim_torch.dtypes import dtype_name
from popsim_torch.records.difference import Difference, FirstDifference, StepDifference
from popsim_torch.records.tensors import printable
from popsim_torch.records.text import listed, short, type_text

__all__ = ["report"]

_ROWS = ("mean", "std", "minimum", "maximum", "norm")
_COUNTS = ("nans", "infs")
_MOST_STEPS = 5


def report(difference: Difference) -> str:
    """Return a difference as text."""
    lines = [f"a: {printable(difference.a)}", f"b: {printable(difference.b)}"]
    lines.append(_verdict(difference))
    if difference.first is not None:
        lines += ["", *_first(difference.first, difference.differing_first)]
        lines += ["", *_growth(difference.growth)]
    rest = [*difference.missing, *_only(difference), *difference.notes]
    if rest:
        lines += ["", *rest]
    return "\n".join(lines)


def _verdict(difference: Difference) -> str:
    if not difference.compared:
        return "Nothing could be compared: the runs have no record of the same step and tensor."
    how = f"{difference.compared} pairs of records in {_count(len(difference.growth), 'step')}"
    if difference.by_value:
        how += f", {difference.by_value} of them by value"
    steps = sum(1 for one in difference.growth if one.differing)
    if steps:
        return f"Compared {how}: the runs differ in {_count(steps, 'step')}."
    if difference.missing:
        return f"Compared {how}: none of them differs, but too little was compared to say more."
    return f"Compared {how}: the runs are equal."


def _first(first: FirstDifference, others: Sequence[str]) -> Iterator[str]:
    place = f"step {first.step}"
    if first.micro_batch is not None:
        place += f", micro-batch {first.micro_batch}"
    if first.replica:
        place += f", replica {first.replica}"
    name = f"'{printable(first.name)}'"
    if first.other.name != first.name:
        name += f", in b '{printable(first.other.name)}'"
    types = list(dict.fromkeys(type_text(one) for one in (first.tensor, first.other)))
    yield f"First difference: {place}, tensor {name} ({' and '.join(types)})"
    where = [f"module {printable(first.module)}"] if first.module else []
    where += [printable(first.source)] if first.source else []
    if where:
        yield f"  {', '.join(where)}"
    yield f"  {printable(first.reason)}"
    rows: list[tuple[str, ...]] = [
        (name, *_pair(getattr(first.a, name), getattr(first.b, name)))
        for name in _ROWS
        if getattr(first.a, name) is not None or getattr(first.b, name) is not None
    ]
    for name in _COUNTS:
        numbers = [getattr(one, name) for one in (first.a, first.b)]
        if any(numbers):
            rows.append((name, *map(str, numbers)))
    samples = first.samples
    if samples is not None:
        rows.append((f"sample {samples.index}", *_pair(samples.a, samples.b)))
    for row in [("", "a", "b"), *rows]:
        yield f"  {row[0]:<10} {row[1]:>24} {row[2]:>24}".rstrip()
    if samples is not None:
        yield f"  Samples differ by at most {samples.ulp} ulp of {dtype_name(samples.dtype)}."
    if len(others) > 1:
        yield f"  In this step {len(others)} tensors differ: {listed(others)}."


def _pair(a: float | None, b: float | None) -> tuple[str, str]:
    """Return two numbers with six digits; with all digits if they would look the same."""
    texts = short(a), short(b)
    if a is None or b is None or a == b or texts[0] != texts[1] or math.isnan(a):
        return texts
    return f"{a:.17g}", f"{b:.17g}"


def _growth(growth: Sequence[StepDifference]) -> Iterator[str]:
    shown = _chosen([one for one in growth if one.differing])
    yield "How it grows: step, tensors that differ, largest relative difference of a norm"
    for one in shown:
        largest = "NaN or inf" if math.isinf(one.largest) else f"{one.largest:.2g}"
        name = f"  {printable(one.name)}" if one.name else ""
        yield f"  {one.step:>8} {one.differing:>6} of {one.compared:<6} {largest:>10}{name}"


def _chosen(steps: Sequence[StepDifference]) -> list[StepDifference]:
    """Return the first and the last step, and some in between whose distances double."""
    if len(steps) <= _MOST_STEPS:
        return list(steps)
    last = len(steps) - 1
    places = {round(last ** (i / (_MOST_STEPS - 2))) for i in range(_MOST_STEPS - 1)}
    return [steps[place] for place in sorted({0, *places, last})]


def _only(difference: Difference) -> Iterator[str]:
    for run, names, steps in (
        ("a", difference.only_in_a, difference.steps_only_in_a),
        ("b", difference.only_in_b, difference.steps_only_in_b),
    ):
        if names:
            yield f"Only in {run}: {_count(len(names), 'tensor')}: {listed(names)}."
        if steps:
            yield f"Only in {run}: {_count(steps, 'step')}."


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
