"""``Estimate``: the simulated cost of a program, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from popsim_torch.machine.figures import amount, count, grade_of, percent, shares, size, time
from popsim_torch.machine.parts import (
    PHASES,
    VERDICTS,
    Batch,
    IpuCost,
    Latency,
    Link,
    MachineInfo,
    ModuleCost,
    OpCost,
    SlotStretch,
    StashEntry,
    Traffic,
    Variable,
)
from popsim_torch.tables import Described, terminal_width

__all__ = ["Estimate"]

_MAX_OPS = 15


@dataclass(frozen=True)
class Estimate(Described):
    """What a program would cost on an IPU: a simulation, without a run and without values.

    ``print`` shows a summary. Each op has the grade of its formula: A published, B fitted to
    published measurements, C assumed.

    Attributes:
        device: The machine.
        batch: The items of a call.
        training: Whether the program trains.
        call_cycles: The cycles of a call, with the host's data.
        update_cycles: The cycles of one weight update; for inference of one run of the schedule.
        ops: The ops, in the program's order.
        variables: The parts of memory.
        ipus: The IPUs of a replica.
        schedule_name: The name of the schedule.
        stretches: The slots of one run of the schedule.
        weight_update_cycles: The cycles of the optimizer.
        all_reduce_cycles: The cycles in which replicas add up gradients.
        links: Copies between IPUs.
        stash: Tensors that are kept for several micro-batches.
        latency: The way of a micro-batch.
        traffic: What moves in a call.
    """

    device: MachineInfo
    batch: Batch
    training: bool
    call_cycles: float
    update_cycles: float
    ops: tuple[OpCost, ...]
    variables: tuple[Variable, ...]
    ipus: tuple[IpuCost, ...]
    schedule_name: str
    stretches: tuple[SlotStretch, ...]
    weight_update_cycles: float
    all_reduce_cycles: float
    links: tuple[Link, ...]
    stash: tuple[StashEntry, ...]
    latency: Latency
    traffic: Traffic

    @property
    def cycles(self) -> float:
        """The simulated cycles of a call."""
        return self.call_cycles

    @property
    def seconds(self) -> float:
        """The simulated time of a call (s)."""
        return self.call_cycles / self.device.clock_hz

    @property
    def items_per_second(self) -> float | None:
        """The simulated rate of all replicas; None if the inputs do not tell the batch size."""
        items = self.batch.items_per_call
        return None if items is None or not self.call_cycles else items / self.seconds

    @property
    def verdict(self) -> str:
        """Whether the memory suffices: ``fits``, ``close`` or ``does not fit``."""
        return max((ipu.memory.verdict for ipu in self.ipus), key=VERDICTS.index)

    @property
    def peak_bytes(self) -> int:
        """The memory that the fullest tile needs (bytes)."""
        return max(ipu.memory.peak for ipu in self.ipus)

    @property
    def busiest(self) -> IpuCost:
        """The IPU that works longest."""
        return max(self.ipus, key=lambda ipu: ipu.busy_cycles)

    @cached_property
    def grades(self) -> dict[str, float]:
        """The share of the ops' cycles by the grade of their formula; sync and glue are B."""
        sums = dict.fromkeys("ABC", 0.0)
        for op in self.ops:
            if op.grade:
                sums[op.grade] += (op.compute + op.exchange) * op.executions
                sums["B"] += (op.sync + op.glue) * op.executions
        total = sum(sums.values()) or 1.0
        return {grade: cycles / total for grade, cycles in sums.items()}

    @property
    def without_formula(self) -> tuple[str, ...]:
        """The ops that have no formula: they count as no time."""
        return tuple(op.name for op in self.ops if not op.grade and op.phase != "setup")

    def by_module(self) -> dict[str, ModuleCost]:
        """Return the cost of each module in a call, by its name.

        The cost of a module includes the modules inside of it; the name ``""`` is the whole model.
        """
        sums: dict[str, ModuleCost] = {}
        for op in self.ops:
            if op.phase not in PHASES:
                continue
            parts = op.module.split(".") if op.module else []
            for depth in range(len(parts) + 1):
                cost = sums.setdefault(".".join(parts[:depth]), ModuleCost())
                cost.cycles[op.phase] += op.cycles * op.executions
                cost.flops += op.flops * op.executions
        return sums

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate as data for JSON; ``docs/report.md`` describes it."""
        return {
            "device": dataclasses.asdict(self.device),
            "batch": dataclasses.asdict(self.batch),
            "training": self.training,
            "verdict": self.verdict,
            "call": {
                "cycles": self.call_cycles,
                "seconds": self.seconds,
                "items_per_second": self.items_per_second,
                "parts": dataclasses.asdict(self.busiest.parts),
            },
            "update": {
                "cycles": self.update_cycles,
                "seconds": self.update_cycles / self.device.clock_hz,
            },
            "grades": self.grades,
            "without_formula": list(self.without_formula),
            "ops": [_plain(op) for op in self.ops],
            "variables": [_variable(one) for one in self.variables],
            "ipus": [_ipu(ipu) for ipu in self.ipus],
            "schedule": {
                "name": self.schedule_name,
                "stretches": [dataclasses.asdict(stretch) for stretch in self.stretches],
                "update_cycles": self.weight_update_cycles,
                "all_reduce_cycles": self.all_reduce_cycles,
            },
            "links": [_link(link) for link in self.links],
            "stash": [_plain(entry) for entry in self.stash],
            "latency": dataclasses.asdict(self.latency),
            "traffic": dataclasses.asdict(self.traffic),
        }

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._figures().items())
        return f"Estimate(simulated; {facts})"

    def _figures(self) -> dict[str, object]:
        rate, grade = self.items_per_second, grade_of(self.grades)
        return {
            "machine": f"{self.device.num_ipus} x {self.device.name}",
            "cycles of a call": amount(self.call_cycles, grade),
            "time of a call": time(self.seconds, grade),
            "items per second": "unknown" if rate is None else amount(rate, grade),
            "memory of the fullest tile": size(self.peak_bytes),
            "verdict": self.verdict,
            "grades": self._grade_text(),
        }

    def _grade_text(self) -> str:
        missing = self.without_formula
        known = shares(self.grades)
        return f"{known}, {count(len(missing), 'op')} without a formula" if missing else known

    def __str__(self) -> str:
        width = terminal_width()
        return "\n".join(line[:width] for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield "Simulated: what this program would cost on an IPU, not what it takes here."
        for name, value in self._figures().items():
            yield f"{name:<28}{value}"
        yield f"{'items of a call':<28}{self.batch.formula}"
        yield ""
        yield f"{'IPU':>4} {'use':>6} {'peak':>9} {'of a tile':>9}  {'verdict':<13} stages"
        for ipu in self.ipus:
            memory = ipu.memory
            stages = ", ".join(map(str, ipu.stages))
            yield (
                f"{ipu.ipu:>4} {percent(ipu.use):>6} {size(memory.peak):>9} "
                f"{percent(memory.peak / memory.capacity):>9}  {memory.verdict:<13} {stages}"
            )
        yield ""
        yield from self._part_lines()
        yield ""
        yield from self._op_lines()

    def _part_lines(self) -> Iterator[str]:
        parts, grade = dataclasses.asdict(self.busiest.parts), grade_of(self.grades)
        total = sum(parts.values()) or 1.0
        yield f"{'cycles':>12} {'share':>6}  of a call on IPU {self.busiest.ipu}"
        for name, cycles in parts.items():
            if cycles >= 1:
                share = percent(cycles / total)
                yield f"{amount(cycles, grade):>12} {share:>6}  {name.replace('_', '-')}"

    def _op_lines(self) -> Iterator[str]:
        total = sum(op.cycles * op.executions for op in self.ops) or 1.0
        longest = sorted(self.ops, key=lambda op: -op.cycles * op.executions)[:_MAX_OPS]
        yield f"{'cycles':>12} {'share':>6} {'runs':>6} grade  op"
        for op in longest:
            cycles = op.cycles * op.executions
            if not cycles:
                continue
            module = f", {op.module}" if op.module else ""
            yield (
                f"{amount(cycles, op.grade):>12} {percent(cycles / total):>6} {op.executions:>6} "
                f"{op.grade or '-':^5}  {op.kind} '{op.name}' ({op.phase} {op.stage}{module})"
            )
        if len(self.ops) > _MAX_OPS:
            yield f"{'':>12} {'':>6} {'':>6} {'':5}  ... {len(self.ops)} ops in all"


def _plain(one: Any) -> dict[str, Any]:
    """Return the fields of a flat dataclass; much faster than ``dataclasses.asdict``."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(one).items()
    }


def _variable(one: Variable) -> dict[str, Any]:
    data = _plain(one)
    data["class"] = data.pop("purpose")
    return data


def _link(one: Link) -> dict[str, Any]:
    data = _plain(one)
    data["from"], data["to"] = data.pop("source"), data.pop("target")
    return data


def _ipu(one: IpuCost) -> dict[str, Any]:
    memory = _plain(one.memory)
    liveness: Sequence[tuple[int, int, float]] = memory.pop("liveness")
    memory["classes"] = {
        name: {"max": most, "total": total} for name, (most, total) in one.memory.classes.items()
    }
    return {
        "ipu": one.ipu,
        "stages": list(one.stages),
        "busy_cycles": one.busy_cycles,
        "use": one.use,
        "parts": dataclasses.asdict(one.parts),
        "memory": memory,
        "liveness": [list(point) for point in liveness],
    }
