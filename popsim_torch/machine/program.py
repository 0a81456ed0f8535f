"""Estimates what a program would cost: the one call that hands a program to the machine model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from popsim_torch import _native
from popsim_torch.dtypes import dtype_name
from popsim_torch.enums import PipelineSchedule
from popsim_torch.ir import Graph, Op, Phase, Program, Role, RunSettings, TensorKind
from popsim_torch.ir import names as tensor_names
from popsim_torch.ir.graph import NO_TENSOR
from popsim_torch.ir.labels import OpLabels
from popsim_torch.machine.estimate import Estimate
from popsim_torch.machine.parts import (
    Batch,
    CallParts,
    IpuCost,
    IpuMemory,
    Latency,
    Link,
    MachineInfo,
    OpCost,
    ScheduledSlot,
    SlotAction,
    SlotStretch,
    StashEntry,
    Traffic,
    Variable,
    verdict_of,
)
from popsim_torch.machine.placing import Placings
from popsim_torch.passes.native_graph import to_native
from popsim_torch.stages import native_name

__all__ = ["EstimateRequest", "estimate_program"]

_KINDS = {"F": "forward", "B": "backward", "U": "update"}
_CLASSES = {
    Role.PARAMETER: "parameters",
    Role.BUFFER: "parameters",
    Role.ACCUMULATOR: "accumulators",
}


@dataclass(frozen=True)
class EstimateRequest:
    """A program, and the machine to estimate it for.

    Attributes:
        program: The program that is the same on every machine.
        run: The settings of its runs.
        training: Whether it trains.
        version: The generation of the IPUs: 1, 2 or 21.
        tiles: Tiles of an IPU (count); None for all.
        clock: Frequency of the clock (Hz); None for that of the generation.
        io_tiles: The tiles that only move data (count).
        proportions: The share of a tile's memory for the temporaries of products, by IPU.
        placings: Where weights and states are kept; None for the tiles.
        feed: How inputs come: ``none`` (the device makes them), ``staged`` (the host copies them
            into place first), ``waiting`` (they are in place when the device asks).
        overlaps_io: Whether input and output run beside the computation.
        micro_batch: Items of a micro-batch; None for the first axis of the program's first input.
    """

    program: Program
    run: RunSettings
    training: bool
    version: int = 2
    tiles: int | None = None
    clock: float | None = None
    io_tiles: int = 0
    proportions: Mapping[int, float] = field(default_factory=dict)
    placings: Placings | None = None
    feed: str = "staged"
    overlaps_io: bool = False
    micro_batch: int | None = None


def estimate_program(request: EstimateRequest) -> Estimate:
    """Return what a program would cost; nothing runs.

    Raises:
        Error: An IPU has no tiles left to compute.
    """
    with _native.translated_errors():
        device = _native.MachineDevice(request.version)
        if request.tiles is not None:
            device.tiles = request.tiles
        if request.clock is not None:
            device.clock = request.clock
        settings = _settings(request, device)
        found = _native.estimate(to_native(request.program.graph), settings)
    return _Reader(request, device, found).estimate()


def _settings(request: EstimateRequest, device: _native.MachineDevice) -> _native.MachineSettings:
    run, graph = request.run, request.program.graph
    settings = _native.MachineSettings(device)
    settings.io_tiles = request.io_tiles
    settings.proportions = dict(request.proportions)
    settings.training = request.training
    settings.positions = list(run.positions)
    settings.ipu_of_stage = dict(run.ipu_of_stage)
    settings.device_iterations = run.loop.device_iterations
    settings.gradient_accumulation = run.loop.gradient_accumulation
    settings.replicas = run.loop.replicas * run.num_processes
    settings.overlaps_io = request.overlaps_io
    settings.set_schedule(native_name(run.schedule))
    settings.set_feed(request.feed if run.reads_inputs else "none")
    variables = graph.of_kind(TensorKind.VARIABLE)
    settings.set_classes({one.id: _CLASSES.get(one.role, "state") for one in variables})
    if request.placings is not None:
        placed = {one.id: request.placings.of(one) for one in variables}
        settings.set_placings(
            {
                tensor: (place.shards, place.off_chip)
                for tensor, place in placed.items()
                if place.shards > 1 or place.off_chip
            }
        )
    return settings


class _Reader:
    """Makes an estimate of what the device's library returns.

    Args:
        request: The request.
        device: The machine.
        found: The result of the library.
    """

    def __init__(
        self, request: EstimateRequest, device: _native.MachineDevice, found: dict[str, Any]
    ) -> None:
        self._request = request
        self._graph: Graph = request.program.graph
        self._device = device
        self._found = found
        self._time: dict[str, Any] = found["time"]
        self._names = {tensor: name for name, tensor in reversed(self._graph.names.items())}
        self._variables = tuple(map(self._variable, found["allocations"]))
        # By IPU and owner: the index of the variable that an op there reads.
        self._index: dict[tuple[int, int], int] = {}
        for index, one in enumerate(found["allocations"]):
            if one["tensor"] != NO_TENSOR and one["purpose"] != "streams":
                self._index.setdefault((one["ipu"], one["tensor"]), index)

    def estimate(self) -> Estimate:
        """Return the estimate."""
        time = self._time
        return Estimate(
            device=self._machine(),
            batch=self._batch(),
            training=self._request.training,
            call_cycles=time["call_cycles"],
            update_cycles=time["run_cycles"],
            ops=tuple(self._ops()),
            variables=self._variables,
            ipus=tuple(self._ipus()),
            schedule_name=PipelineSchedule(self._request.run.schedule).name,
            stretches=tuple(
                SlotStretch(times, tuple(map(_slot, slots))) for times, slots in time["stretches"]
            ),
            weight_update_cycles=time["update_cycles"],
            all_reduce_cycles=time["all_reduce_cycles"],
            links=tuple(
                Link(source, target, "backward" if back else "forward", size, cycles)
                for source, target, back, size, cycles in time["links"]
            ),
            stash=tuple(self._stash()),
            latency=self._latency(),
            traffic=self._traffic(),
        )

    @property
    def _replicas(self) -> int:
        run = self._request.run
        return run.loop.replicas * run.num_processes

    def _machine(self) -> MachineInfo:
        device, ipus = self._device, len(self._found["memory"])
        return MachineInfo(
            name=device.name,
            version=device.version,
            tiles=device.tiles,
            io_tiles=self._request.io_tiles,
            tile_bytes=device.tile_bytes,
            clock_hz=device.clock,
            num_ipus=ipus * self._replicas,
            ipus_per_replica=ipus,
        )

    def _batch(self) -> Batch:
        loop = self._request.run.loop
        sizes = [one.shape[0] for one in self._graph.of_kind(TensorKind.INPUT) if one.shape]
        size = self._request.micro_batch or (sizes[0] if sizes else None)
        count = loop.device_iterations * loop.gradient_accumulation * self._replicas
        return Batch(
            micro_batch=size,
            device_iterations=loop.device_iterations,
            gradient_accumulation=loop.gradient_accumulation,
            replicas=self._replicas,
            items_per_call=None if size is None else size * count,
        )

    def _executions(self, op: Op) -> int:
        loop, training = self._request.run.loop, self._request.training
        if op.phase == Phase.SETUP:
            return 0
        if op.phase == Phase.UPDATE or not training:
            return loop.device_iterations
        return loop.device_iterations * loop.gradient_accumulation

    def _ops(self) -> list[OpCost]:
        labels = OpLabels(self._request.program)
        costs, flops = self._found["ops"], self._found["flops"]
        ops: list[OpCost] = []
        for index, op in enumerate(self._graph.ops):
            cost, ipu = costs[index], self._found["ipu_of_op"][index]
            ops.append(
                OpCost(
                    name=labels.name(op),
                    kind=op.kind,
                    module=labels.layer(op),
                    phase=op.phase.name.lower(),
                    stage=op.stage,
                    ipu=ipu,
                    source=op.origin.source,
                    executions=self._executions(op),
                    cycles=cost.cycles,
                    compute=cost.compute,
                    exchange=cost.exchange,
                    sync=cost.sync,
                    glue=cost.glue,
                    temporary_bytes=cost.temporary_bytes,
                    flops=flops[index],
                    formula=cost.formula,
                    grade=cost.grade,
                    plan=cost.plan,
                    inputs=self._indices(op.inputs, ipu),
                    outputs=self._indices(op.outputs, ipu),
                    recomputed=op.phase == Phase.BACKWARD and tensor_names.is_rebuilt(op.name),
                )
            )
        return ops

    def _indices(self, tensors: list[int], ipu: int) -> tuple[int, ...]:
        owners = (self._graph.root_of(one).id for one in tensors if one != NO_TENSOR)
        found = (self._index.get((ipu, owner)) for owner in owners)
        return tuple(index for index in found if index is not None)

    def _variable(self, one: dict[str, Any]) -> Variable:
        known = one["tensor"] != NO_TENSOR
        tensor = self._graph.tensors[one["tensor"]] if known else None
        always = one["first_op"] < 0
        return Variable(
            name="code" if tensor is None else self._names.get(tensor.id, tensor.name),
            purpose=one["purpose"],
            ipu=one["ipu"],
            bytes=one["bytes"],
            tiles=one["tiles"],
            bytes_per_tile=one["bytes_per_tile"],
            shape=() if tensor is None else tensor.shape,
            dtype="" if tensor is None else dtype_name(tensor.dtype),
            first_op=None if always else one["first_op"],
            last_op=None if always else one["last_op"],
            copies=one["copies"],
        )

    def _ipus(self) -> list[IpuCost]:
        stages: dict[int, list[int]] = {}
        given = self._request.run.ipu_of_stage
        for stage in range(1 + max((op.stage for op in self._graph.ops), default=0)):
            stages.setdefault(given.get(stage, stage), []).append(stage)
        return [
            IpuCost(
                ipu=memory["ipu"],
                stages=tuple(stages.get(memory["ipu"], ())),
                busy_cycles=time["busy"],
                use=time["use"],
                parts=CallParts(**time["call"]),
                memory=self._memory(memory),
            )
            for memory, time in zip(self._found["memory"], self._time["ipus"], strict=True)
        ]

    def _memory(self, memory: dict[str, Any]) -> IpuMemory:
        capacity = self._device.tile_bytes
        return IpuMemory(
            capacity=capacity,
            peak=memory["peak"],
            mean=memory["mean"],
            worst_tile=memory["worst_tile"],
            peak_op=None if memory["peak_op"] < 0 else memory["peak_op"],
            always=memory["always"],
            verdict=verdict_of(memory["peak"], capacity),
            classes=memory["classes"],
            tiles=memory["tiles"],
            always_tiles=memory["always_tiles"],
            liveness=memory["liveness"],
        )

    def _stash(self) -> list[StashEntry]:
        first: dict[int, int] = {}
        for op in self._graph.ops:
            for one in op.outputs:
                if one != NO_TENSOR:
                    first.setdefault(self._graph.root_of(one).id, op.stage)
        given = self._request.run.ipu_of_stage
        stages = range(1 + max((op.stage for op in self._graph.ops), default=0))
        own = {given.get(stage, stage): stage for stage in reversed(stages)}
        entries = []
        for one, variable in zip(self._found["allocations"], self._variables, strict=True):
            if variable.purpose != "stash":
                continue
            stage = first.get(one["tensor"], 0)
            # What came from another IPU is kept by the first stage that reads it.
            if given.get(stage, stage) != variable.ipu:
                stage = own[variable.ipu]
            entries.append(StashEntry(variable.name, stage, variable.copies, variable.bytes))
        return entries

    def _latency(self) -> Latency:
        found = self._time["latency"]
        return Latency(**found, round_trip=sum(found.values()))

    def _traffic(self) -> Traffic:
        found, replicas = self._time["traffic"], self._replicas
        return Traffic(
            all_reduce_bytes=found["all_reduce_bytes"],
            all_reduces=found["all_reduces"],
            host_in_bytes=found["host_in_bytes"] * replicas,
            host_out_bytes=found["host_out_bytes"] * replicas,
            off_chip_bytes=found["off_chip_bytes"],
        )


def _slot(slot: dict[str, Any]) -> ScheduledSlot:
    actions = tuple(
        SlotAction(_KINDS[kind], stage, ipu, None if kind == "U" else micro_batch, cycles)
        for kind, stage, ipu, micro_batch, cycles in slot["actions"]
    )
    return ScheduledSlot(slot["cycles"], slot["link_cycles"], actions)
