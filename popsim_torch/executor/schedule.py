"""``executor.schedule()``: which stage works on which micro-batch in which time slot."""

from __future__ import annotations

import bisect
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

from popsim_torch.enums import PipelineSchedule
from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.executor.timeline import Timeline
from popsim_torch.ir import Phase, Program, names
from popsim_torch.tables import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Schedule", "ScheduledAction", "ipus_of", "percent", "read_schedule"]

_KINDS = {"F": "forward", "B": "backward", "U": "update"}
_LETTERS = {"forward": "F", "recompute": "R", "backward": "B", "update": "U"}
_SHOWN_IN_FULL = 24  # slots
_LEAST_WIDTH = 40  # characters


@dataclass(frozen=True)
class ScheduledAction:
    """The work of a stage on one micro-batch, or its weight update.

    Attributes:
        kind: ``forward``, ``recompute`` (the activations that the backward pass computes again),
            ``backward`` or ``update``.
        stage: The pipeline stage.
        micro_batch: The micro-batch, counted from 0; in training from the last update. None for an
            update.
        slot: The time slot, counted from 0; in training from the last update.
    """

    kind: str
    stage: int
    micro_batch: int | None
    slot: int

    def __str__(self) -> str:
        number = "" if self.micro_batch is None else self.micro_batch
        return f"{_LETTERS[self.kind]}{number}"


@dataclass(frozen=True)
class _Part:
    """Neighbouring slots that repeat, each time one micro-batch later.

    Attributes:
        first: The number of its first slot.
        times: How often its slots run.
        slots: The actions of each slot in the first repetition.
    """

    first: int
    times: int
    slots: tuple[tuple[ScheduledAction, ...], ...]

    @property
    def end(self) -> int:
        return self.first + self.times * len(self.slots)

    def at(self, slot: int) -> list[ScheduledAction]:
        """Return the actions of a slot, counted from the start of the schedule."""
        later, place = divmod(slot - self.first, len(self.slots))
        return [
            replace(
                one,
                micro_batch=None if one.micro_batch is None else one.micro_batch + later,
                slot=slot,
            )
            for one in self.slots[place]
        ]


@dataclass(frozen=True)
class Schedule(Sequence[ScheduledAction]):
    """When each stage works on which micro-batch: a sequence of actions that prints as a grid.

    The actions are in the order in which one thread runs them. Stages with IPUs of their own run
    the actions of one time slot at the same time. In training the schedule is that of one weight
    update, and a call repeats it for each device iteration.

    Attributes:
        name: The name in ``PipelineSchedule``.
        training: Whether there are backward passes and an update.
        num_stages: The number of stages.
        num_micro_batches: The number of micro-batches that it runs.
        repeats: How often a call runs the schedule.
        ipus: The IPU of each stage.
        recomputes: The stages that recompute activations before a backward pass.
        timeline: When the actions of the latest recorded run began and ended; None if no run has
            been recorded.
    """

    name: str
    training: bool
    num_stages: int
    num_micro_batches: int
    repeats: int
    ipus: tuple[int, ...]
    recomputes: frozenset[int]
    _parts: tuple[_Part, ...] = field(repr=False)
    timeline: Timeline | None = field(default=None, compare=False)

    @property
    def num_slots(self) -> int:
        """The number of time slots, with that of the update."""
        return self._parts[-1].end

    @cached_property
    def _counts(self) -> list[int]:
        """The number of actions before each part, and in total."""
        found = [0]
        for part in self._parts:
            found.append(found[-1] + part.times * sum(map(len, part.slots)))
        return found

    def __len__(self) -> int:
        return self._counts[-1]

    def __iter__(self) -> Iterator[ScheduledAction]:
        for slot in range(self.num_slots):
            yield from self._in_slot(slot)

    @overload
    def __getitem__(self, index: int) -> ScheduledAction: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ScheduledAction]: ...
    def __getitem__(self, index: int | slice) -> ScheduledAction | Sequence[ScheduledAction]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"the schedule has {len(self)} actions, and no action {index}")
        number = bisect.bisect_right(self._counts, place) - 1
        part = self._parts[number]
        later, place = divmod(place - self._counts[number], sum(map(len, part.slots)))
        first = [one for slot in part.slots for one in slot][place]
        slot = first.slot + later * len(part.slots)
        return next(
            one for one in part.at(slot) if one.kind == first.kind and one.stage == first.stage
        )

    def at(self, slot: int, stage: int | None = None) -> list[ScheduledAction]:
        """Return the actions of a time slot, in their order.

        Args:
            slot: The time slot, counted from 0; negative numbers count from the end.
            stage: Only the actions of this stage; None for all stages.

        Raises:
            UsageTypeError: The slot or the stage is not an int.
            UsageValueError: There is no such slot or stage.
        """
        _check_number("slot", slot, -self.num_slots, self.num_slots)
        if stage is not None:
            _check_number("stage", stage, 0, self.num_stages)
        found = self._in_slot(slot % self.num_slots)
        return [one for one in found if stage is None or one.stage == stage]

    def _in_slot(self, slot: int) -> list[ScheduledAction]:
        return next(part for part in self._parts if slot < part.end).at(slot)

    @cached_property
    def use(self) -> tuple[float, ...]:
        """The share of its time in which each stage works on micro-batches, as planned.

        A forward and a backward pass take equally long on all stages, and an update takes no time.
        ``timeline.use`` has the measured shares.
        """
        work = [0] * self.num_stages
        total = 0
        for part in self._parts:
            for slot in part.slots:
                on_ipu: dict[int, int] = dict.fromkeys(self.ipus, 0)
                for one in slot:
                    if one.kind in ("forward", "backward"):
                        on_ipu[self.ipus[one.stage]] += 1
                        work[one.stage] += part.times
                total += part.times * max(on_ipu.values())
        return tuple(own / max(total, 1) for own in work)

    def text(self, *, full: bool = False, width: int | None = None) -> str:
        """Return the grid: a line for each stage, a column for each time slot.

        Args:
            full: Whether to show all repetitions of a part that repeats; otherwise a long schedule
                shows the first and the last.
            width: The largest width of the lines (characters); what does not fit goes below. None
                for the width of the terminal.

        Raises:
            UsageValueError: The width is less than 40.
        """
        if width is None:
            width = max(shutil.get_terminal_size().columns, _LEAST_WIDTH)
        elif isinstance(width, bool) or not isinstance(width, int) or width < _LEAST_WIDTH:
            raise UsageValueError(
                f"Schedule.text: width is {width!r}. Pass an int, {_LEAST_WIDTH} or more."
            )
        columns = list(self._columns(full))
        labels = ["time", *self.labels]
        rows = [[label, *cells] for label, *cells in zip(labels, *columns, strict=True)]
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        grid = table(rows[0], rows[1:], widths, width=width)
        lines = [line.rstrip() for line in grid.splitlines()]
        return "\n".join([self.title, "", *lines, "", *self._notes()])

    def spans(self, *, full: bool = False) -> Iterator[tuple[range, int]]:
        """Yield the time slots to show, and after each range how many repetitions are left out.

        Args:
            full: Whether to leave out nothing; short schedules are always complete.
        """
        full = full or self.num_slots <= _SHOWN_IN_FULL
        for part in self._parts:
            length, left_out = len(part.slots), part.times - 2
            # A gap must save at least two columns.
            if full or length * left_out <= 2:
                yield range(part.first, part.end), 0
            else:
                yield range(part.first, part.first + length), left_out
                yield range(part.end - length, part.end), 0

    def _columns(self, full: bool) -> Iterator[list[str]]:
        """Yield the head and the cells of each column."""
        for slots, left_out in self.spans(full=full):
            yield from map(self._column, slots)
            if left_out:
                yield ["...", *(f"x{left_out}" for _ in range(self.num_stages))]

    def _column(self, slot: int) -> list[str]:
        cells: list[list[str]] = [[] for _ in range(self.num_stages)]
        for one in self._in_slot(slot):
            cells[one.stage].append(str(one))
        return [str(slot), *map(" ".join, cells)]

    @property
    def labels(self) -> list[str]:
        """The name of each stage, with its IPU if that has another number."""
        own = all(stage == ipu for stage, ipu in enumerate(self.ipus))
        return [
            f"stage {stage}" if own else f"stage {stage}, IPU {ipu}"
            for stage, ipu in enumerate(self.ipus)
        ]

    @property
    def title(self) -> str:
        """The name and the counts of the schedule."""
        what = "training" if self.training else "inference"
        per = " per weight update" if self.training else ""
        stages = "1 stage" if self.num_stages == 1 else f"{self.num_stages} stages"
        again = f"; {self.repeats} updates in a call" if self.repeats > 1 else ""
        count = self.num_micro_batches
        micro_batches = f"{count} micro-batch{'es' if count != 1 else ''}"
        return f"{self.name}, {what}: {stages}, {micro_batches}{per}{again}"

    def _notes(self) -> Iterator[str]:
        words = {"F": "forward", "R": "recompute", "B": "backward", "U": "update"}
        shown = "F" + "R" * bool(self.recomputes) + "BU" * self.training
        yield ", ".join(f"{letter} {words[letter]}" for letter in shown) + " (of micro-batch)"
        low, high = percent(min(self.use)), percent(max(self.use))
        share = low if low == high else f"{low} to {high}"
        yield f"A stage computes {share} of the time if all passes take equally long."

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def plot(self, path: Any = None) -> Figure:
        """Draw the schedule as planned and, if a run has been recorded, as it ran.

        ``executor.record_timeline()`` records the runs that follow.

        Args:
            path: The file to save the picture to, such as ``"schedule.png"``; None for no file.

        Returns:
            The picture, a ``matplotlib.figure.Figure``; notebooks show it.

        Raises:
            Error: matplotlib is not installed.
        """
        from popsim_torch.executor.schedule_plot import plot_schedule

        return plot_schedule(self, path)


def percent(share: float) -> str:
    """Return a share of 1 as a string; only 1 itself is 100%."""
    return f"{share:.1%}" if 0.99 <= share < 1 else f"{share:.0%}"


def _check_number(name: str, value: object, least: int, end: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageTypeError(f"Schedule.at: {name} is {value!r}. Pass an int.")
    if not least <= value < end:
        raise UsageValueError(
            f"Schedule.at: {name} is {value}; the schedule has {end}. Pass {least} to {end - 1}."
        )


def read_schedule(compiled: CompiledModel, timeline: Timeline | None) -> Schedule:
    """Return the schedule of a compiled model.

    Args:
        compiled: The model.
        timeline: The latest recorded run, if there is one.
    """
    run, plan = compiled.run, compiled.executable.plan
    num_stages = len(plan.lane_of_stage)
    training = compiled.plan is not None
    recomputes = frozenset(_recomputing_stages(compiled.program)) if training else frozenset()
    iterations, accumulation = run.loop.device_iterations, run.loop.gradient_accumulation
    return Schedule(
        name=PipelineSchedule(run.schedule).name,
        training=training,
        num_stages=num_stages,
        num_micro_batches=accumulation if training else iterations,
        repeats=iterations if training else 1,
        ipus=ipus_of(run.ipu_of_stage, num_stages),
        recomputes=recomputes,
        timeline=timeline,
        _parts=tuple(_read_parts(plan.schedule_times(), num_stages, recomputes)),
    )


def ipus_of(ipu_of_stage: Mapping[int, int], num_stages: int) -> tuple[int, ...]:
    """Return the IPU of each stage."""
    return tuple(ipu_of_stage.get(stage, stage) for stage in range(num_stages))


def _recomputing_stages(program: Program) -> Iterator[int]:
    for op in program.graph.ops:
        if op.phase == Phase.BACKWARD and names.is_rebuilt(op.name):
            yield op.stage


def _read_parts(
    stretches: Sequence[tuple[int, list[list[str]]]], num_stages: int, recomputes: frozenset[int]
) -> Iterator[_Part]:
    first = 0
    for times, slots in stretches:
        found = [
            tuple(action for word in words for action in _read(word, slot, num_stages, recomputes))
            for slot, words in enumerate(slots, first)
        ]
        part = _Part(first, times, tuple(found))
        first = part.end
        yield part


def _read(
    word: str, slot: int, num_stages: int, recomputes: frozenset[int]
) -> Iterator[ScheduledAction]:
    """Yield the actions that a word of the device's library, such as ``2F0``, stands for."""
    if word == "U":
        for stage in range(num_stages):
            yield ScheduledAction("update", stage, None, slot)
        return
    letter = "F" if "F" in word else "B"
    stage, micro_batch = map(int, word.split(letter))
    if letter == "B" and stage in recomputes:
        yield ScheduledAction("recompute", stage, micro_batch, slot)
    yield ScheduledAction(_KINDS[letter], stage, micro_batch, slot)
