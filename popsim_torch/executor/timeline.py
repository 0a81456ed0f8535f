"""``executor.timeline()``: when the actions of a run began and ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

from popsim_torch import _native
from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.executor.table import table

__all__ = ["TimedAction", "Timeline", "read_timeline"]

_KINDS = {"F": "forward", "B": "backward", "U": "update"}


@dataclass(frozen=True)
class TimedAction:
    """The work of a stage on one micro-batch, or a weight update, in a run.

    Attributes:
        kind: ``forward``, ``backward`` (with the activations that it recomputes) or ``update``.
        stage: The pipeline stage; None for an update, which updates the weights of all stages.
        micro_batch: The micro-batch, counted from 0; in training from the last update. None for an
            update.
        device_iteration: The device iteration, counted from 0.
        replica: The replica, counted from 0; 0 for an update, which is that of all replicas.
        thread: The thread, counted from 0; 0 is the thread of the caller.
        begin: The time at which it began (seconds from the beginning of the run).
        end: The time at which it ended.
    """

    kind: str
    stage: int | None
    micro_batch: int | None
    device_iteration: int
    replica: int
    thread: int
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """The time that it took."""
        return self.end - self.begin


@dataclass(frozen=True)
class StageTime:
    """The times of a stage in a run, in seconds, over all replicas.

    Attributes:
        forward: The mean time of a forward pass; 0 if there was none.
        backward: The mean time of a backward pass; 0 if there was none.
        busy: The time of all its passes.
        threads: The threads that it ran on; each replica of a stage runs on one thread.
    """

    forward: float
    backward: float
    busy: float
    threads: tuple[int, ...]


class Timeline(Sequence[TimedAction]):
    """The actions of a run in the order in which they began; prints as a table of the stages.

    Args:
        actions: The actions.
        num_stages: The number of stages.
        seconds: The time of the whole run.
        training: Whether the run trained.
    """

    def __init__(
        self,
        actions: Sequence[TimedAction],
        num_stages: int,
        seconds: float,
        *,
        training: bool,
    ) -> None:
        self._actions = tuple(sorted(actions, key=lambda one: one.begin))
        self.num_stages = num_stages
        self.seconds = seconds
        self.training = training

    @overload
    def __getitem__(self, index: int) -> TimedAction: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TimedAction]: ...
    def __getitem__(self, index: int | slice) -> TimedAction | Sequence[TimedAction]:
        return self._actions[index]

    def __len__(self) -> int:
        return len(self._actions)

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return 1 + max((one.replica for one in self._actions), default=0)

    @property
    def num_threads(self) -> int:
        """The number of threads that the stages ran on."""
        return len({one.thread for one in self._actions})

    @cached_property
    def stages(self) -> tuple[StageTime, ...]:
        """The times of each stage."""
        found = []
        for stage in range(self.num_stages):
            own = [one for one in self._actions if one.stage == stage]
            times: dict[str, list[float]] = {"forward": [], "backward": []}
            for one in own:
                times[one.kind].append(one.seconds)
            means = {kind: sum(all_) / max(len(all_), 1) for kind, all_ in times.items()}
            threads = tuple(sorted({one.thread for one in own}))
            found.append(StageTime(**means, busy=sum(map(sum, times.values())), threads=threads))
        return tuple(found)

    @property
    def use(self) -> tuple[float, ...]:
        """The share of the run in which each stage worked on micro-batches, mean of its threads."""
        shares = (one.busy / self.seconds / max(len(one.threads), 1) for one in self.stages)
        return tuple(min(share, 1.0) for share in shares)

    @property
    def idle(self) -> tuple[float, ...]:
        """The share of the run in which each stage waited; weight updates are no waiting."""
        return tuple(max(1 - share - self.update, 0.0) for share in self.use)

    @cached_property
    def update(self) -> float:
        """The share of the run in which weights were updated."""
        return sum(one.seconds for one in self._actions if one.kind == "update") / self.seconds

    def of_iteration(self, device_iteration: int) -> list[TimedAction]:
        """Return the actions of one device iteration, in the order in which they began."""
        return [one for one in self._actions if one.device_iteration == device_iteration]

    def __repr__(self) -> str:
        return (
            f"Timeline({len(self)} actions of {self.num_stages} stages on {self.num_threads} "
            f"threads, {1e6 * self.seconds:.0f} us)"
        )

    def __str__(self) -> str:
        header = ["Stage", "Thread", "Forward us", "Backward us", "Computes", "Idle"]
        rows = [
            [
                str(stage),
                ", ".join(map(str, time.threads)) or "-",
                f"{1e6 * time.forward:.1f}",
                f"{1e6 * time.backward:.1f}" if self.training else "-",
                f"{use:.0%}",
                f"{idle:.0%}",
            ]
            for stage, (time, use, idle) in enumerate(
                zip(self.stages, self.use, self.idle, strict=True)
            )
        ]
        threads = "1 thread" if self.num_threads == 1 else f"{self.num_threads} threads"
        last = f"The run took {1e6 * self.seconds:.0f} us on {threads}"
        if self.training:
            last += f"; weight updates took {self.update:.0%} of it"
        return f"{table(header, rows)}\n\n{last}."


def read_timeline(compiled: CompiledModel, recorded: _native.Timeline) -> Timeline:
    """Return the timeline of a recorded run of a compiled model."""
    training = compiled.plan is not None
    accumulation = compiled.run.loop.gradient_accumulation
    num_stages = len(compiled.executable.plan.lane_of_stage)
    actions = []
    for one in recorded.actions():
        is_update = one.kind == "U"
        iteration, step = divmod(one.index, accumulation)
        if is_update or not training:
            iteration = one.index
        actions.append(
            TimedAction(
                _KINDS[one.kind],
                None if is_update else one.stage,
                None if is_update else (step if training else one.index),
                iteration,
                one.replica,
                one.thread,
                one.begin,
                one.end,
            )
        )
    return Timeline(actions, num_stages, recorded.seconds, training=training)
