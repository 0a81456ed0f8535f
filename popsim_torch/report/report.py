"""``Report``: what a report of a program says, and its tables as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from popsim_torch.report import text
from popsim_torch.report.comparison import Comparison
from popsim_torch.report.insights import Insight, find_insights
from popsim_torch.report.modules import (
    ModuleCost,
    OpCost,
    PhaseCost,
    by_module,
    by_purpose,
    read_ops,
)
from popsim_torch.tables import Described

__all__ = ["IpuMemory", "RecordedRun", "Report"]


@dataclass(frozen=True)
class IpuMemory:
    """The simulated memory of an IPU.

    Attributes:
        ipu: The IPU, in a replica.
        capacity: Bytes of a tile's memory.
        peak: Bytes in use on the fullest tile when most is in use.
        mean: Bytes in use then, mean of all tiles.
        worst_tile: The fullest tile.
        peak_op: The name of the op that runs then; empty if nothing but what is always there
            matters.
        always: Bytes on the fullest tile that are always in use.
        verdict: ``fits``, ``close`` or ``does not fit``.
        classes: Bytes at the peak by class, on the fullest tile and over all tiles.
        tiles: Bytes in use at the peak, by tile.
        liveness: For each step: the index of the op, bytes on the fullest tile, mean of all tiles.
    """

    ipu: int
    capacity: int
    peak: float
    mean: float
    worst_tile: int
    peak_op: str
    always: float
    verdict: str
    classes: Mapping[str, Mapping[str, float]]
    tiles: tuple[float, ...]
    liveness: tuple[tuple[int, float, float], ...]


@dataclass(frozen=True)
class RecordedRun:
    """A call of the program.

    Attributes:
        number: Its number, counted from 0.
        begin: When it began (seconds of this computer's clock; only differences have a meaning).
        end: When it ended.
        lanes: What the threads of this computer did, as in ``executor.timeline()``.
        simulated_cycles: The cycles that it would take on an IPU; None without an estimate.
    """

    number: int
    begin: float
    end: float
    lanes: tuple[Mapping[str, Any], ...]
    simulated_cycles: float | None

    @property
    def measured_seconds(self) -> float:
        """The time that it took on this computer; not the time of an IPU."""
        return self.end - self.begin


class Report(Described):
    """A report of a program: ``popsim_torch.report.open(folder)``.

    Every figure of the estimate is simulated: it is what the model of the machine gives, and no
    measurement. ``print`` shows the summary, the modules and some advice.

    Args:
        data: The checked content of the file.
        folder: The folder of the report; None if it was not written.
    """

    def __init__(self, data: Mapping[str, Any], folder: Path | None = None) -> None:
        self.data = data
        self.folder = folder

    @property
    def name(self) -> str:
        """The name of the program."""
        return str(self.data["name"])

    @property
    def estimate(self) -> Mapping[str, Any] | None:
        """The simulated cost, as ``Estimate.as_dict()`` has it; None if there is none."""
        found: Mapping[str, Any] | None = self.data["estimate"]
        return found

    @property
    def why_no_estimate(self) -> str:
        """Why there is no estimate; empty if there is one."""
        return "" if self.estimate else (self.data.get("no_estimate") or "it was not computed")

    @cached_property
    def ops(self) -> tuple[OpCost, ...]:
        """The ops of the program with their simulated cost; none without an estimate."""
        return () if self.estimate is None else read_ops(self.estimate["ops"])

    @cached_property
    def memory(self) -> tuple[IpuMemory, ...]:
        """The simulated memory of each IPU of a replica; none without an estimate."""
        if self.estimate is None:
            return ()
        return tuple(self._memory(one) for one in self.estimate["ipus"])

    def _memory(self, row: Mapping[str, Any]) -> IpuMemory:
        memory = dict(row["memory"])
        memory.pop("always_tiles")
        peak_op = memory.pop("peak_op")
        memory = {name: memory[name] for name in IpuMemory.__dataclass_fields__ if name in memory}
        memory["tiles"] = tuple(memory["tiles"])
        return IpuMemory(
            ipu=row["ipu"],
            peak_op="" if peak_op is None else self.ops[peak_op].name,
            liveness=tuple((int(op), worst, mean) for op, worst, mean in row["liveness"]),
            **memory,
        )

    @cached_property
    def runs(self) -> tuple[RecordedRun, ...]:
        """The recorded calls: the first ones, as many as the options say."""
        return tuple(
            RecordedRun(
                number=one["number"],
                begin=one["measured"]["begin"],
                end=one["measured"]["end"],
                lanes=tuple(one["measured"]["lanes"]),
                simulated_cycles=None if one["simulated"] is None else one["simulated"]["cycles"],
            )
            for one in self.data["runs"]
        )

    @property
    def calls(self) -> int:
        """The number of all calls."""
        return int(self.data["calls"])

    @cached_property
    def insights(self) -> tuple[Insight, ...]:
        """The largest tensors, stages and ops, each with one advice and its simulated effect."""
        return () if self.estimate is None else tuple(find_insights(self.estimate, self.ops))

    @property
    def app(self) -> Mapping[str, Any]:
        """What the program noted with ``popsim_torch.report.annotate``; empty if nothing."""
        if self.folder is None:
            return {}
        try:
            found = json.loads((self.folder / "app.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def by_module(self) -> dict[str, ModuleCost]:
        """Return the simulated cost of each module by its path, with the modules inside of it.

        The path ``""`` is the whole program. Ops that belong to no module only count there.
        """
        return by_module(self.ops, self.estimate["variables"] if self.estimate else ())

    def by_purpose(self) -> dict[str, PhaseCost]:
        """Return the simulated cost of what only training needs, by name.

        For example ``SGD`` and ``gradient accumulation``; the cost of the modules contains it.
        """
        return by_purpose(self.ops)

    def print_operations(self) -> None:
        """Print the simulated cost of each module and phase, and of optimizer and accumulation."""
        print(text.operations(self))

    def compare(self, other: Report) -> Comparison:
        """Compare this report with another one, figure by figure, by module and by op.

        Args:
            other: The other report.

        Returns:
            The comparison; ``print`` shows it, ``write_page`` writes it as a page.
        """
        return Comparison(self, other)

    def __repr__(self) -> str:
        what = f"{len(self.ops)} ops" if self.estimate else "no estimate"
        return f"Report({self.name!r}, {what}, {len(self.runs)} of {self.calls} calls recorded)"

    def __str__(self) -> str:
        return text.summary(self)

    def _figures(self) -> dict[str, object]:
        return dict(text.figures(self))
