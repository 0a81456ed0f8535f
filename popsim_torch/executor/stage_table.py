"""``executor.stages()``: the stages of a model, with their modules, sizes and times."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from torch import nn

from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.executor.placed_bytes import PlacedBytes, placed_bytes
from popsim_torch.executor.profile import Profile
from popsim_torch.executor.schedule import ipus_of
from popsim_torch.executor.summary import forward_ops, lies_in, module_of
from popsim_torch.executor.table import table
from popsim_torch.executor.timeline import Timeline
from popsim_torch.ir import Phase, Program
from popsim_torch.options import Options

__all__ = ["StageSummary", "StageTable", "describe_stages"]

_HEADER = (
    *("Stage", "IPU", "Thread", "Modules", "Parameters", "Bytes", "State bytes"),
    *("Forward us", "Backward us", "Share"),
)
_OPTIONAL = ("State bytes", "Bytes")
"""Columns that a narrow table leaves out."""


@dataclass(frozen=True)
class StageSummary:
    """A stage of a model.

    Attributes:
        stage: Its number.
        ipu: Its IPU.
        thread: The thread that it runs on if the stages run at the same time, counted from 0; with
            several replicas that of the first one.
        modules: The names of its modules, without those inside of them; a module that several
            stages use is in each of them.
        parameters: Number of elements of the parameters that it uses.
        parameter_bytes: Memory of these parameters on the device (bytes).
        state_bytes: Memory of its buffers, and of the optimizer's state and the accumulators of
            these parameters (bytes).
        placed: Memory of parameters, buffers and states for one replica, as
            ``Options.TensorLocations`` places them: on the IPU, and beside it.
        forward: The mean time of a forward pass (s); None if it was not measured.
        backward: The mean time of a backward pass (s); None if it was not measured, and in
            inference.
        share: The share of the time of all stages; None if it was not measured.
    """

    stage: int
    ipu: int
    thread: int
    modules: tuple[str, ...]
    parameters: int
    parameter_bytes: int
    state_bytes: int
    placed: PlacedBytes
    forward: float | None = None
    backward: float | None = None
    share: float | None = None

    @property
    def seconds(self) -> float | None:
        """The mean time of both passes (s); None if it was not measured."""
        return None if self.forward is None else self.forward + (self.backward or 0.0)


@dataclass(frozen=True, repr=False)
class StageTable(Sequence[StageSummary]):
    """The stages of a model, in order; prints as a table.

    Attributes:
        rows: The stages.
        source: Where the times come from: ``recorded run``, ``profile``, or empty if nothing was
            measured.
        num_threads: The number of threads in the recorded run; None without one.
    """

    rows: tuple[StageSummary, ...]
    source: str = ""
    num_threads: int | None = None

    @overload
    def __getitem__(self, index: int) -> StageSummary: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[StageSummary]: ...
    def __getitem__(self, index: int | slice) -> StageSummary | Sequence[StageSummary]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def balance(self) -> float | None:
        """The mean time of the stages as a share of the slowest one's; None if not measured.

        It is 1.0 if all stages take equally long. A pipeline is as fast as its slowest stage.
        """
        times = [row.seconds for row in self.rows if row.seconds is not None]
        slowest = max(times, default=0.0)
        return sum(times) / len(times) / slowest if slowest else None

    def __str__(self) -> str:
        rows = [_cells(row) for row in self.rows]
        return "\n".join([table(_HEADER, rows, None, _OPTIONAL), "", *self._notes()])

    __repr__ = __str__

    def _notes(self) -> Iterator[str]:
        on_chip = sum(row.placed.on_chip for row in self.rows)
        off_chip = sum(row.placed.off_chip for row in self.rows)
        if on_chip + off_chip != sum(row.parameter_bytes + row.state_bytes for row in self.rows):
            yield f"Divided among replicas, a replica keeps {on_chip + off_chip:,} bytes of them."
        if off_chip:
            yield f"Options.TensorLocations place {off_chip:,} bytes beside the IPUs."
        if self.balance is None:
            yield (
                "Times: not measured. Call record_timeline() and then the model, or pass "
                "stages(executor.profile(...))."
            )
            return
        slowest = max(self.rows, key=lambda row: row.seconds or 0.0)
        yield f"Times: means over the micro-batches of the {self.source}."
        yield f"Balance: {self.balance:.0%}; the slowest stage is {slowest.stage}."
        planned = len({row.thread for row in self.rows})
        if self.num_threads is not None and self.num_threads < planned:
            yield f"The recorded run used {self.num_threads} of {planned} threads."


def _cells(row: StageSummary) -> tuple[str, ...]:
    def us(seconds: float | None) -> str:
        return "-" if seconds is None else f"{1e6 * seconds:.1f}"

    return (
        *map(str, (row.stage, row.ipu, row.thread)),
        ", ".join(_shortened(row.modules)) or "-",
        *(f"{number:,}" for number in (row.parameters, row.parameter_bytes, row.state_bytes)),
        *(us(row.forward), us(row.backward)),
        "-" if row.share is None else f"{row.share:.0%}",
    )


def _shortened(modules: Iterable[str]) -> list[str]:
    """Return names of modules, where neighbours that only differ in their number are joined."""
    runs: list[list[str]] = []
    for name in modules:
        if runs and _follows(runs[-1][-1], name):
            runs[-1].append(name)
        else:
            runs.append([name])
    return [own[0] if len(own) == 1 else f"{own[0]}-{own[-1].rpartition('.')[2]}" for own in runs]


def _follows(name: str, other: str) -> bool:
    pattern = re.compile(r"(.*?)(\d+)")
    one, next_ = pattern.fullmatch(name), pattern.fullmatch(other)
    if one is None or next_ is None:
        return False
    return one[1] == next_[1] and one[1][-1:] in ("", ".") and int(one[2]) + 1 == int(next_[2])


def describe_stages(
    model: nn.Module,
    compiled: CompiledModel,
    options: Options,
    timeline: Timeline | None = None,
    profile: Profile | None = None,
) -> StageTable:
    """Describe the stages of a compiled model.

    Args:
        model: The model.
        compiled: Its program.
        options: Its options.
        timeline: The latest recorded run.
        profile: Measured times, which are used instead of those of the timeline.
    """
    program, lanes = compiled.program, compiled.executable.plan.lane_of_stage
    count = len(lanes)
    ipus = ipus_of(compiled.run.ipu_of_stage, count)
    modules = _modules_of_stages(program, dict(model.named_modules()), count)
    using = _stages_using(program)
    times, source = _times(compiled, timeline, profile)
    total = sum(forward + (backward or 0.0) for forward, backward in times) or 1.0
    rows = []
    for stage in range(count):
        own = {
            name for name, tensor in program.parameters.items() if stage in using.get(tensor, ())
        }
        sizes = [program.graph.tensors[program.parameters[name]] for name in own]
        states = [
            program.graph.tensors[tensor]
            for name, tensor in program.states.items()
            if name.rpartition("___")[2] in own
        ]
        states += [
            program.graph.tensors[tensor]
            for tensor in program.buffers.values()
            if stage in using.get(tensor, ())
        ]
        forward, backward = times[stage] if times else (None, None)
        rows.append(
            StageSummary(
                stage,
                ipus[stage],
                lanes[stage],
                modules[stage],
                sum(one.numel for one in sizes),
                sum(one.numel * one.dtype.itemsize for one in sizes),
                sum(one.numel * one.dtype.itemsize for one in states),
                placed_bytes([*sizes, *states], options, compiled.run.loop.replicas),
                forward,
                backward,
                None if forward is None else (forward + (backward or 0.0)) / total,
            )
        )
    threads = timeline.num_threads if timeline is not None and profile is None else None
    return StageTable(tuple(rows), source, threads)


def _times(
    compiled: CompiledModel, timeline: Timeline | None, profile: Profile | None
) -> tuple[list[tuple[float, float | None]], str]:
    """Return the mean times of each stage forward and backward, and where they come from."""
    training = compiled.plan is not None
    if profile is not None:
        loop = compiled.run.loop
        passes = loop.device_iterations * loop.gradient_accumulation * loop.replicas
        sums = {
            phase: [0.0] * len(compiled.executable.plan.lane_of_stage)
            for phase in ("forward", "backward")
        }
        for op in profile:
            if op.phase in sums and op.stage < len(sums[op.phase]):
                sums[op.phase][op.stage] += op.seconds / passes
        pairs = zip(sums["forward"], sums["backward"], strict=True)
        return [(one, two if training else None) for one, two in pairs], "profile"
    if timeline is not None:
        found = [(one.forward, one.backward if training else None) for one in timeline.stages]
        return found, "recorded run"
    return [], ""


def _stages_using(program: Program) -> Mapping[int, Collection[int]]:
    """Return the stages that read or write each tensor in a pass, by the tensor's id."""
    found: dict[int, set[int]] = {}
    for op in program.graph.ops:
        if op.phase in (Phase.FORWARD, Phase.BACKWARD):
            for root in program.graph.roots([*op.inputs, *op.outputs]):
                found.setdefault(root.id, set()).add(op.stage)
    return found


def _modules_of_stages(
    program: Program, modules: Collection[str], count: int
) -> list[tuple[str, ...]]:
    """Return the outermost modules that belong to each stage alone, or that share stages."""
    calls: dict[str, set[int]] = {}
    for op in forward_ops(program.graph):
        calls.setdefault(module_of(op.origin.scope, modules), set()).add(op.stage)
    found: list[dict[str, None]] = [{} for _ in range(count)]
    for path, stages in calls.items():
        for stage in stages:
            outer = _outermost(path, stage, calls)
            if outer:
                found[stage].setdefault(outer)
    order = {name: number for number, name in enumerate(modules)}
    return [tuple(sorted(own, key=order.__getitem__)) for own in found]


def _outermost(path: str, stage: int, calls: Mapping[str, Collection[int]]) -> str:
    """Return the outermost module around a module that no other stage uses."""
    outer = path
    while "." in outer:
        wider = outer.rpartition(".")[0]
        used = {one for name, stages in calls.items() if lies_in(name, wider) for one in stages}
        if used != {stage}:
            break
        outer = wider
    return outer
