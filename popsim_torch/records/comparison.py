"""Compares two runs: where do they first differ, and how does the difference grow?"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch

from popsim_torch.dtypes import dtype_name
from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.observe.record import Record
from popsim_torch.records.coverage import Known, about_prefixes, what_is_missing
from popsim_torch.records.difference import (
    Difference,
    FirstDifference,
    SampleDifference,
    StepDifference,
)
from popsim_torch.records.equality import (
    default_tolerance,
    narrower,
    norm_difference,
    same,
    ulp_distance,
)
from popsim_torch.records.pairs import pair_tensors, unlike_tensors
from popsim_torch.records.prefixes import find_prefixes
from popsim_torch.records.reader import Run
from popsim_torch.records.tensors import RecordedTensor
from popsim_torch.statistics import Statistics

__all__ = ["compare"]

# Name, replica and micro-batch: the place of a record in a step.
_Place = tuple[str, int, int | None]
_Records = dict[_Place, Record]


def compare(a: Run, b: Run, *, tolerance: float = 0.0) -> Difference:
    """Say where two runs first differ, and how the difference grows.

    Steps are compared in order, and in each step the tensors in the order of the program of run a.
    Tensors correspond if they have the same name, shape and kind. All names of the model may begin
    with another path: ``fit`` calls the model ``model``, a ``poptorch.function`` has a variable for
    it. The output of a module that ``eager_record`` has recorded corresponds to the last result of
    this module in a program.

    If only inputs correspond, or no weight, gradient or updated weight although both runs know
    some, nothing says that the runs are equal, and ``Difference.missing`` says what is missing.

    Fingerprints say whether all bits are equal. Where one run has none, or the dtypes of a tensor
    differ, the numbers that both have are compared instead: counts of NaN and infinities, moments,
    samples, largest values. Their tolerance, relative to the root mean square of the tensor, is
    that of the dtype with fewer digits: 2^-8 for float16, 2^-5 for bfloat16, else 1e-5.

    Args:
        a: A run.
        b: The run to compare with.
        tolerance: A tolerance, relative, for all tensors: bits may differ then. 0 for the rules
            above.

    Raises:
        UsageTypeError: One of the runs is not a ``Run``, or the tolerance is not a number.
        UsageValueError: The tolerance is negative or not finite.
        Error: A run is damaged.
    """
    for one in (a, b):
        if not isinstance(one, Run):
            raise UsageTypeError(
                f"compare: {one!r:.100} is a {type(one).__name__}. Pass poptorch.Run(path)."
            )
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)):
        raise UsageTypeError(f"compare: the tolerance {tolerance!r} is not a number.")
    if not 0 <= tolerance < float("inf"):
        raise UsageValueError(f"compare: the tolerance {tolerance!r} is negative or not finite.")
    return _Comparison(a, b, float(tolerance)).result()


class _Comparison:
    """What is known of the difference of two runs so far."""

    def __init__(self, a: Run, b: Run, tolerance: float) -> None:
        self._runs = a, b
        self._tolerance = tolerance
        self._details = a.details, b.details
        self._prefixes = find_prefixes(*self._details)
        self._pairs = pair_tensors(*self._details, self._prefixes)
        self._inverse = {theirs: ours for ours, theirs in self._pairs.items()}
        self._first: FirstDifference | None = None
        self._growth: list[StepDifference] = []
        self._differing_first: tuple[str, ...] = ()
        self._counts: Counter[str] = Counter()
        self._compared: set[str] = set()
        self._mixed: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._steps_alone = [0, 0]

    def result(self) -> Difference:
        """Compare all steps, and return what was found."""
        for step, ours, theirs in _joined(*self._runs):
            if ours is None or theirs is None:
                self._steps_alone[ours is None] += 1
            else:
                self._compare_step(step, ours, theirs)
        a, b = (run.names for run in self._runs)
        with_a, with_b = set(a), set(b)
        return Difference(
            a=str(self._runs[0].path),
            b=str(self._runs[1].path),
            first=self._first,
            differing_first=self._differing_first,
            growth=tuple(self._growth),
            compared=self._counts["compared"],
            by_value=self._counts["by value"],
            only_in_a=tuple(name for name in a if self._pairs.get(name) not in with_b),
            only_in_b=tuple(name for name in b if self._inverse.get(name) not in with_a),
            steps_only_in_a=self._steps_alone[0],
            steps_only_in_b=self._steps_alone[1],
            missing=tuple(self._missing(a, b)),
            notes=tuple(self._notes()),
        )

    def _missing(self, a: list[str], b: list[str]) -> Iterator[str]:
        """Yield why the runs may differ where nothing was compared.

        Args:
            a: The names with records in run a.
            b: The same for run b.
        """
        return what_is_missing(
            Known(self._details[0], a),
            Known(self._details[1], b),
            self._pairs,
            unlike_tensors(*self._details, self._prefixes),
            self._compared,
        )

    def _compare_step(self, step: int, a: list[Record], b: list[Record]) -> None:
        ours, theirs = _by_place(a), _by_place(b)
        with_a, with_b = ({one.name for one in records} for records in (a, b))
        differing: dict[str, None] = {}
        compared: set[str] = set()
        largest, largest_name = 0.0, ""
        for place, record in ours.items():
            name, replica, micro_batch = place
            if name not in self._pairs:
                continue
            other = theirs.pop((self._pairs[name], replica, micro_batch), None)
            if other is None:
                self._counts["alone"] += self._pairs[name] in with_b
                continue
            is_equal = self._is_equal(record, other)
            if is_equal is None:
                continue
            compared.add(name)
            if is_equal:
                continue
            differing[name] = None
            distance = norm_difference(record.statistics, other.statistics)
            if distance is not None and distance > largest:
                largest, largest_name = distance, name
        self._counts["alone"] += sum(self._inverse.get(name) in with_a for name, *_ in theirs)
        if differing and not self._differing_first:
            self._differing_first = tuple(differing)
        self._compared |= compared
        if compared:
            found = StepDifference(step, len(compared), len(differing), largest, largest_name)
            self._growth.append(found)

    def _is_equal(self, a: Record, b: Record) -> bool | None:
        """Compare two records, and remember the first difference; None if nothing is in common."""
        tensor = self._details[0].get(a.name, RecordedTensor(a.name))
        other = self._details[1].get(b.name, RecordedTensor(b.name))
        dtypes = tensor.dtype, other.dtype
        is_mixed = None not in dtypes and dtypes[0] != dtypes[1]
        outcome = same(
            a.statistics,
            b.statistics,
            exact=not self._tolerance and not is_mixed,
            tolerance=self._tolerance or default_tolerance(*dtypes),
        )
        if outcome.equal is None:
            self._counts["nothing"] += 1
            return None
        self._counts["compared"] += 1
        if not outcome.by_bits:
            self._counts["by value"] += 1
            if not self._tolerance:
                self._remember_tolerance(a.name, *dtypes)
        if not outcome.equal and self._first is None:
            self._first = FirstDifference(
                step=a.step,
                micro_batch=a.micro_batch,
                replica=a.replica,
                tensor=tensor,
                other=other,
                a=a.statistics,
                b=b.statistics,
                reason=outcome.reason,
                samples=_samples(a.statistics, b.statistics, narrower(*dtypes)),
            )
        return outcome.equal

    def _remember_tolerance(self, name: str, a: torch.dtype | None, b: torch.dtype | None) -> None:
        known = [dtype_name(one) for one in (a, b) if one is not None]
        why = "fingerprints are missing"
        if len(set(known)) > 1:
            why = f"{known[0]} in a, {known[1]} in b"
        self._mixed[why, f"{default_tolerance(a, b):.2g}"].add(name)

    def _notes(self) -> Iterator[str]:
        yield from about_prefixes(self._prefixes)
        if self._tolerance:
            yield f"Values may differ by {self._tolerance:g}, relative, and bits by anything."
        for (why, tolerance), tensors in self._mixed.items():
            number = f"{len(tensors)} tensors" if len(tensors) > 1 else "1 tensor"
            yield f"{number} compared with the tolerance {tolerance}, relative: {why}."
        if self._counts["nothing"]:
            yield (
                f"{self._counts['nothing']} pairs of records have no numbers in common; record "
                "Fingerprint, Moments or Sample in both runs."
            )
        if self._counts["alone"]:
            yield (
                f"{self._counts['alone']} records have no counterpart of the same micro-batch and "
                "replica."
            )


def _joined(a: Run, b: Run) -> Iterator[tuple[int, list[Record] | None, list[Record] | None]]:
    """Yield each step that one of the runs has, with its records in both."""
    runs = [groupby(run.read_records(histograms=False), key=lambda one: one.step) for run in (a, b)]
    heads: list[Any] = [next(steps, None) for steps in runs]
    while any(head is not None for head in heads):
        step = min(head[0] for head in heads if head is not None)
        found: list[list[Record] | None] = [None, None]
        for i, head in enumerate(heads):
            if head is not None and head[0] == step:
                found[i] = list(head[1])
                heads[i] = next(runs[i], None)
        yield step, found[0], found[1]


def _by_place(records: list[Record]) -> _Records:
    """Return the records of a step by their place.

    Where a tensor has one record, its micro-batch is None: one micro-batch is all micro-batches.
    """
    number = Counter((one.name, one.replica) for one in records)
    return {
        (
            one.name,
            one.replica,
            one.micro_batch if number[one.name, one.replica] > 1 else None,
        ): one
        for one in records
    }


def _samples(a: Statistics, b: Statistics, dtype: torch.dtype | None) -> SampleDifference | None:
    if a.samples is None or b.samples is None or dtype is None:
        return None
    found = ulp_distance(a.samples, b.samples, dtype)
    if found is None:
        return None
    distance, index = found
    return SampleDifference(
        distance, dtype, index, float(a.samples[index]), float(b.samples[index])
    )
