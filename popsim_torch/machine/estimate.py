"""``Estimate``: the simulated cost of a program, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from popsim_torch.tables import Described, terminal_width

__all__ = [
    "CLASSES",
    "PHASES",
    "Batch",
    "CallParts",
    "Estimate",
    "IpuCost",
    "IpuMemory",
    "Latency",
    "Link",
    "MachineInfo",
    "ModuleCost",
    "OpCost",
    "ScheduledSlot",
    "SlotAction",
    "SlotStretch",
    "StashEntry",
    "Traffic",
    "Variable",
    "verdict_of",
]

PHASES = ("forward", "backward", "update")
CLASSES = (
    *("parameters", "state", "accumulators", "stash"),
    *("activations", "temporaries", "code", "streams"),
)
"""What memory is for."""
_FITS, _CLOSE = 0.85, 1.15
"""Shares of a tile's memory: the error of the model is about 15 %."""
_VERDICTS = ("fits", "close", "does not fit")
_MAX_OPS = 15


@dataclass(frozen=True)
class MachineInfo:
    """The simulated machine.

    Attributes:
        name: The generation of its IPUs.
        version: The generation as options name it: 1, 2 or 21.
        tiles: Tiles of an IPU (count).
        io_tiles: Those of them that only move data (count).
        tile_bytes: Memory of a tile.
        clock_hz: Frequency of the clock (Hz).
        num_ipus: IPUs of all replicas (count).
        ipus_per_replica: IPUs of one replica (count).
    """

    name: str
    version: int
    tiles: int
    io_tiles: int
    tile_bytes: int
    clock_hz: float
    num_ipus: int
    ipus_per_replica: int


@dataclass(frozen=True)
class Batch:
    """How many items a call works on.

    Attributes:
        micro_batch: Items of a micro-batch; None if the inputs do not tell.
        device_iterations: Weight updates (training) or micro-batches (inference) of a call.
        gradient_accumulation: Micro-batches of a weight update; 1 for inference.
        replicas: Copies of the model, in all processes.
        items_per_call: The product of all; None if ``micro_batch`` is.
    """

    micro_batch: int | None
    device_iterations: int
    gradient_accumulation: int
    replicas: int
    items_per_call: int | None

    @property
    def formula(self) -> str:
        """The product in words."""
        parts = (
            (self.micro_batch, "micro-batch"),
            (self.gradient_accumulation, "accumulation"),
            (self.device_iterations, "device iterations"),
            (self.replicas, "replicas"),
        )
        shown = [f"{'?' if value is None else value} ({name})" for value, name in parts]
        return " x ".join(shown)


@dataclass(frozen=True)
class CallParts:
    """How the busiest IPU spends a call (cycles, simulated); the parts add up to the call."""

    compute: float
    exchange: float
    sync: float
    glue: float
    links: float
    host: float
    update: float
    all_reduce: float
    waiting: float


@dataclass(frozen=True)
class OpCost:
    """The simulated cost of one op; cycles are those of one execution.

    Attributes:
        name: The tensor that it computes; ``backward of <forward op>`` if that has no name.
        kind: The kind of op on the device.
        module: The module that it belongs to; updates belong to the module of their weight.
        phase: ``setup``, ``forward``, ``backward`` or ``update``.
        stage: Its pipeline stage.
        ipu: The IPU that runs it.
        source: ``file:line`` of the user's code.
        executions: Executions in a call.
        cycles: The sum of the next four.
        compute: Cycles in which tiles compute.
        exchange: Cycles in which tiles exchange data.
        sync: Cycles in which tiles wait for each other.
        glue: Cycles of control code.
        temporary_bytes: Memory on the fullest tile that only this op needs.
        flops: Floating-point operations.
        formula: The formula; empty if there is none.
        grade: Where the formula comes from: A published, B fitted, C assumed; empty for none.
        plan: How a product or a convolution is divided.
        inputs: Indices of ``Estimate.variables``.
        outputs: Indices of ``Estimate.variables``.
        recomputed: Whether it repeats a forward op in the backward pass.
    """

    name: str
    kind: str
    module: str
    phase: str
    stage: int
    ipu: int
    source: str
    executions: int
    cycles: float
    compute: float
    exchange: float
    sync: float
    glue: float
    temporary_bytes: int
    flops: float
    formula: str
    grade: str
    plan: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    recomputed: bool


@dataclass(frozen=True)
class Variable:
    """A part of the memory of an IPU.

    Attributes:
        name: The tensor, or ``code``.
        purpose: What it is for, one of ``CLASSES``.
        ipu: The IPU.
        bytes: Its size, of one copy on all tiles.
        tiles: The tiles that have a part of it (count).
        bytes_per_tile: Its size on the fullest tile, of one copy.
        shape: The shape of the tensor.
        dtype: The dtype.
        first_op: The index of the op that writes it; None if it is always there.
        last_op: The index of the last op that reads it; None if it is always there.
        copies: More than 1 if several micro-batches in flight keep it.
    """

    name: str
    purpose: str
    ipu: int
    bytes: int
    tiles: int
    bytes_per_tile: int
    shape: tuple[int, ...]
    dtype: str
    first_op: int | None
    last_op: int | None
    copies: int


@dataclass(frozen=True)
class IpuMemory:
    """The simulated memory of an IPU (bytes).

    Attributes:
        capacity: The memory of a tile.
        peak: The most that a tile needs.
        mean: The mean over the tiles at the same step.
        worst_tile: The tile with the peak.
        peak_op: The index of the op that runs then; None if nothing is added to what is always
            there.
        always: What is always there, on the fullest tile.
        verdict: ``fits``, ``close`` or ``does not fit``.
        classes: For each of ``CLASSES`` at the peak: the bytes on the worst tile, and on all tiles.
        tiles: The bytes on each tile at the peak.
        always_tiles: What is always there, on each tile.
        liveness: For each step: the index of the op, the bytes on the fullest tile, and the mean.
    """

    capacity: int
    peak: int
    mean: float
    worst_tile: int
    peak_op: int | None
    always: int
    verdict: str
    classes: dict[str, tuple[int, int]]
    tiles: list[int] = field(repr=False)
    always_tiles: list[int] = field(repr=False)
    liveness: list[tuple[int, int, float]] = field(repr=False)


@dataclass(frozen=True)
class IpuCost:
    """What one IPU of a replica does.

    Attributes:
        ipu: Its number.
        stages: The stages that it runs.
        busy_cycles: The cycles in which it works, in one run of the schedule.
        use: Their share.
        parts: How it spends a call.
        memory: Its memory.
    """

    ipu: int
    stages: tuple[int, ...]
    busy_cycles: float
    use: float
    parts: CallParts
    memory: IpuMemory


@dataclass(frozen=True)
class SlotAction:
    """The work of a stage in a time slot: ``forward``, ``backward`` or ``update``."""

    kind: str
    stage: int
    ipu: int
    micro_batch: int | None
    cycles: float


@dataclass(frozen=True)
class ScheduledSlot:
    """A time slot: the actions of all IPUs, then the copies between IPUs."""

    cycles: float
    link_cycles: float
    actions: tuple[SlotAction, ...]


@dataclass(frozen=True)
class SlotStretch:
    """Neighbouring slots that repeat, each time one micro-batch later."""

    times: int
    slots: tuple[ScheduledSlot, ...]


@dataclass(frozen=True)
class Link:
    """What one micro-batch sends from an IPU to another."""

    source: int
    target: int
    direction: str
    bytes: float
    cycles: float


@dataclass(frozen=True)
class StashEntry:
    """A tensor that a stage keeps for several micro-batches."""

    name: str
    stage: int
    copies: int
    bytes: int


@dataclass(frozen=True)
class Latency:
    """The simulated way of a micro-batch (s)."""

    host_to_ipu: float
    compute: float
    ipu_to_host: float
    round_trip: float


@dataclass(frozen=True)
class Traffic:
    """What moves in a call (bytes): between replicas for each IPU; with the host in all replicas.

    Attributes:
        all_reduce_bytes: What each IPU sends to add up gradients.
        all_reduces: How often replicas add up gradients (count).
        host_in_bytes: From the host.
        host_out_bytes: To the host.
        off_chip_bytes: To and from the memory beside the IPUs, for all IPUs of a replica.
    """

    all_reduce_bytes: float
    all_reduces: int
    host_in_bytes: float
    host_out_bytes: float
    off_chip_bytes: float


@dataclass
class ModuleCost:
    """The simulated cost of a module in a call, with the modules inside of it, by phase."""

    cycles: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    flops: float = 0.0

    @property
    def total(self) -> float:
        """The cycles of all phases."""
        return sum(self.cycles.values())


def verdict_of(peak: float, capacity: int) -> str:
    """Return ``fits``, ``close`` or ``does not fit``, for the fullest tile of an IPU.

    Args:
        peak: Bytes that the tile needs.
        capacity: Bytes that it has.
    """
    share = peak / capacity
    return _VERDICTS[0 if share <= _FITS else 1 if share <= _CLOSE else 2]


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
        return max((ipu.memory.verdict for ipu in self.ipus), key=_VERDICTS.index)

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
        rate = self.items_per_second
        return {
            "machine": f"{self.device.num_ipus} x {self.device.name}",
            "cycles of a call": _rounded(self.call_cycles),
            "time of a call": f"{_rounded(1e3 * self.seconds)} ms",
            "items per second": "unknown" if rate is None else _rounded(rate),
            "memory of the fullest tile": f"{_rounded(self.peak_bytes / 1024)} KiB",
            "verdict": self.verdict,
            "grades": self._grade_text(),
        }

    def _grade_text(self) -> str:
        shares = ", ".join(f"{grade} {share:.0%}" for grade, share in self.grades.items())
        missing = len(self.without_formula)
        return f"{shares}, {missing} ops without a formula" if missing else shares

    def __str__(self) -> str:
        width = terminal_width()
        return "\n".join(line[:width] for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield "Simulated: what this program would cost on an IPU, not what it takes here."
        for name, value in self._figures().items():
            yield f"{name:<28}{value}"
        yield f"{'items of a call':<28}{self.batch.formula}"
        yield ""
        yield f"{'IPU':>4} {'use':>6} {'peak KiB':>9} {'of':>5}  {'verdict':<13} stages"
        for ipu in self.ipus:
            memory = ipu.memory
            stages = ", ".join(map(str, ipu.stages))
            yield (
                f"{ipu.ipu:>4} {ipu.use:>6.1%} {_rounded(memory.peak / 1024):>9} "
                f"{memory.capacity // 1024:>5}  {memory.verdict:<13} {stages}"
            )
        yield ""
        yield from self._part_lines()
        yield ""
        yield from self._op_lines()

    def _part_lines(self) -> Iterator[str]:
        parts = dataclasses.asdict(self.busiest.parts)
        total = sum(parts.values()) or 1.0
        yield f"{'cycles':>12} {'share':>6}  of a call on IPU {self.busiest.ipu}"
        for name, cycles in parts.items():
            if cycles:
                yield f"{_rounded(cycles):>12} {cycles / total:>6.1%}  {name.replace('_', '-')}"

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
                f"{_rounded(cycles):>12} {cycles / total:>6.1%} {op.executions:>6} "
                f"{op.grade or '-':^5}  {op.kind} '{op.name}' ({op.phase} {op.stage}{module})"
            )
        if len(self.ops) > _MAX_OPS:
            yield f"{'':>12} {'':>6} {'':>6} {'':5}  ... {len(self.ops)} ops in all"


def _rounded(value: float) -> str:
    """Return a number with two significant digits."""
    if not value:
        return "0"
    text = f"{value:.2g}"
    return f"{float(text):,.0f}" if abs(value) >= 10 else f"{float(text):g}"


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
