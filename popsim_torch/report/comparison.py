"""Two reports side by side."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from popsim_torch.machine.figures import amount, count, size, time
from popsim_torch.report import page, text
from popsim_torch.report.modules import tree
from popsim_torch.tables import cut_front, terminal_width

if TYPE_CHECKING:
    from popsim_torch.report.report import Report

__all__ = ["ComparedFigure", "Comparison"]

_MOST_ROWS = 40
_WIDEST = 28
_AUTOMATIC = re.compile(r"(training|inference|popsim_report__.*?)(_\d+)?$")
"""Names of folders that reports of programs without a name have."""


@dataclass(frozen=True)
class ComparedFigure:
    """A figure of both reports.

    Attributes:
        name: What it is.
        first: Its value in the first report; None if it has none.
        second: Its value in the second report.
        first_text: The first value for people.
        second_text: The second value for people.
        simulated: Whether it is simulated; else it is exact, or measured on this computer.
    """

    name: str
    first: float | None
    second: float | None
    first_text: str
    second_text: str
    simulated: bool = True

    @property
    def ratio(self) -> float | None:
        """The second value by the first one; None if there is none."""
        return self.second / self.first if self.first and self.second is not None else None

    @property
    def change(self) -> str:
        """The change as text: ``-25 %``, ``x 3.1``; empty if there is none."""
        if self.ratio is None:
            return ""
        if self.ratio == 1:
            return "equal"
        if 0.5 <= self.ratio < 2:
            return f"{100 * (self.ratio - 1):+.2g} %"
        return f"x {self.ratio:.2g}"


class Comparison:
    """Two reports side by side; ``print`` shows the figures, modules and ops that differ.

    Args:
        first: A report.
        second: The other one; changes are those from the first one to this one.
    """

    def __init__(self, first: Report, second: Report) -> None:
        self.first, self.second = first, second

    @property
    def labels(self) -> tuple[str, str]:
        """What the reports are called: the parts of their paths that differ, or their names."""
        folders = self.first.folder, self.second.folder
        if folders[0] is None or folders[1] is None:
            return f"A: {self.first.name}", f"B: {self.second.name}"
        parts = [one.resolve().parts for one in folders if one is not None]
        pairs = zip(*parts, strict=False)
        common = next((place for place, (a, b) in enumerate(pairs) if a != b), len(parts[0]) - 1)
        ends = [list(one[common:]) or [one[-1]] for one in parts]
        # Of with_feeds/training and without_feeds/training, the end says nothing.
        if all(len(one) > 1 and _AUTOMATIC.match(one[-1]) for one in ends):
            ends = [one[:-1] for one in ends]
        first, second = (cut_front("/".join(one), _WIDEST) for one in ends)
        return first, second

    def figures(self) -> list[ComparedFigure]:
        """Return the figures of the whole programs."""
        return [*self._simulated(), *self._others()]

    def _simulated(self) -> Iterator[ComparedFigure]:
        a, b = self.first.estimate, self.second.estimate
        if a is None or b is None:
            return
        calls = a["call"], b["call"]
        yield _figure("seconds of a call", [one["seconds"] for one in calls], time)
        yield _figure("cycles of a call", [one["cycles"] for one in calls], amount)
        yield _figure("cycles of an update", [one["update"]["cycles"] for one in (a, b)], amount)
        yield _figure("items per second", [one["items_per_second"] for one in calls], amount)
        items = [one["batch"]["items_per_call"] for one in (a, b)]
        if all(items):
            each = [one["seconds"] / count for one, count in zip(calls, items, strict=True)]
            yield _figure("seconds for an item", each, time)
        for part in a["call"]["parts"]:
            values = [one["parts"][part] for one in calls]
            if any(values):
                yield _figure(f"  of a call: {part.replace('_', '-')}", values, amount)
        peaks = [max((m.peak for m in one.memory), default=0.0) for one in self._both]
        yield _figure("bytes on the fullest tile", peaks, size)
        traffic = a["traffic"], b["traffic"]
        for key in ("host_in_bytes", "host_out_bytes", "all_reduce_bytes", "off_chip_bytes"):
            values = [one[key] for one in traffic]
            if any(values):
                name = key.removesuffix("_bytes").replace("_", " ")
                yield _figure(f"bytes in a call: {name}", values, size)

    def _others(self) -> Iterator[ComparedFigure]:
        a, b = self._both
        iterations = [one.data["static"]["device_iterations"] for one in self._both]
        yield _plain("device iterations in a call", *iterations)
        accumulation = [one.data["static"]["gradient_accumulation"] for one in self._both]
        yield _plain("micro-batches per update", *accumulation)
        yield _plain("calls", a.calls, b.calls)
        if a.runs and b.runs:
            seconds = [one.runs[-1].measured_seconds for one in self._both]
            yield _figure("measured on this computer: last recorded call", seconds, time, False)

    @property
    def _both(self) -> tuple[Report, Report]:
        return self.first, self.second

    def modules(self) -> list[ComparedFigure]:
        """Return the simulated cycles of a call of each module, in the first report's order."""
        both = [one.by_module() for one in self._both]
        names = tree(list(both[0])) + [one for one in tree(list(both[1])) if one not in both[0]]
        return [
            _figure(
                name or "(all)",
                [one[name].cycles if name in one else None for one in both],
                amount,
            )
            for name in names
        ]

    def ops(self) -> list[ComparedFigure]:
        """Return the simulated cycles of a call of each op, the largest changes first.

        Ops are paired by name; those with one name and phase are added up.
        """
        sums: dict[str, list[float | None]] = {}
        for place, report in enumerate(self._both):
            for op in report.ops:
                row = sums.setdefault(f"{op.name} ({op.phase})", [None, None])
                row[place] = (row[place] or 0.0) + op.call_cycles
        found = [_figure(name, values, amount) for name, values in sums.items()]
        return sorted(found, key=lambda one: -abs((one.second or 0) - (one.first or 0)))

    def __str__(self) -> str:
        lines = [*_verdicts(self), *_table("simulated", self.labels, self._simulated())]
        lines += ["", *_table("not simulated", self.labels, self._others())]
        if self.first.estimate is not None and self.second.estimate is not None:
            lines += ["", *_table("simulated cycles, module", self.labels, self.modules())]
            changed = [one for one in self.ops() if one.first != one.second]
            title = f"simulated cycles, {count(len(changed), 'op')} that differ"
            lines += ["", *_table(title, self.labels, changed)]
        width = terminal_width()
        return "\n".join(line[:width].rstrip() for line in lines)

    def __repr__(self) -> str:
        return "Comparison({!r}, {!r})".format(*self.labels)

    def write_page(self, path: str | os.PathLike[str]) -> Path:
        """Write the comparison as one HTML page that needs no network.

        Args:
            path: The file to write.

        Returns:
            The path.

        Raises:
            OSError: The file cannot be written.
        """
        target = Path(path)
        page.write(target, page.comparison_page(self))
        return target


def _verdicts(comparison: Comparison) -> list[str]:
    lines = []
    for label, one in zip(comparison.labels, (comparison.first, comparison.second), strict=True):
        if one.estimate is None:
            lines.append(f"{label}: there is no estimate: {one.why_no_estimate}.")
        else:
            memory = one.estimate["verdict"]
            grades = ", ".join(f"{k} {100 * v:.0f} %" for k, v in one.estimate["grades"].items())
            lines.append(f"{label}: memory: {memory}; grades of op cycles: {grades}")
    return [*lines, f"model of the machine: {text.validation(comparison.second)}", ""]


def _figure(
    name: str,
    values: Sequence[float | None],
    shown: Callable[[float | None], str],
    simulated: bool = True,
) -> ComparedFigure:
    first, second = values
    return ComparedFigure(name, first, second, shown(first), shown(second), simulated)


def _plain(name: str, first: float, second: float) -> ComparedFigure:
    return ComparedFigure(name, first, second, f"{first:,}", f"{second:,}", False)


def _table(
    title: str, labels: tuple[str, str], rows: Iterator[ComparedFigure] | list[ComparedFigure]
) -> list[str]:
    listed = list(rows)
    shown = listed[:_MOST_ROWS]
    sizes = [max(12, *(len(label) for label in labels))] * 2
    names = max([len(title), *(len(one.name) for one in shown)])
    lines = [f"{title:<{names}}  {labels[0]:>{sizes[0]}}  {labels[1]:>{sizes[1]}}  change"]
    lines += [
        f"{one.name:<{names}}  {one.first_text:>{sizes[0]}}  {one.second_text:>{sizes[1]}}  "
        f"{one.change}"
        for one in shown
    ]
    if len(listed) > len(shown):
        lines.append(f"and {len(listed) - len(shown)} more")
    return lines
