"""The parts of an ``Estimate``: machine, batch, ops, memory, schedule, traffic; all simulated."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "CLASSES",
    "PHASES",
    "VERDICTS",
    "Batch",
    "CallParts",
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
VERDICTS = ("fits", "close", "does not fit")
"""From the best to the worst."""
_FITS, _CLOSE = 0.85, 1.15
"""Shares of a tile's memory: the error of the model is about 15 %."""


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
    return VERDICTS[0 if share <= _FITS else 1 if share <= _CLOSE else 2]
