"""Computes how well a pipeline is used, and how many micro-batches it needs for that."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from popsim_torch.enums import PipelineSchedule
from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.stages.checks import MAX_IPUS
from popsim_torch.stages.schedules import count_rule, micro_batches_in_flight, times_of

__all__ = ["pipeline_use", "smallest_gradient_accumulation"]


def pipeline_use(
    num_stages: int,
    gradient_accumulation: int,
    schedule: PipelineSchedule = PipelineSchedule.Default,
    *,
    forward: float = 1.0,
    backward: float = 1.0,
    update: float = 0.0,
) -> float:
    """Return the share of time in which a stage of a pipeline computes on micro-batches.

    In the rest of the time the stage waits, while the pipeline fills and drains, or updates
    weights. All stages take equally long; the times may have any unit.

    Args:
        num_stages: The number of stages, each on its own IPU (1 to 64).
        gradient_accumulation: The number of micro-batches per weight update.
        schedule: When stages run.
        forward: The time of a stage in the forward pass.
        backward: The time of a stage in the backward pass.
        update: The time of the weight update.

    Raises:
        UsageTypeError: A count is not an int, a time is not a number, or the schedule is not a
            ``PipelineSchedule``.
        UsageValueError: A count or a time is out of range.
    """
    where = "pipeline_use"
    _check_count(where, "num_stages", num_stages, MAX_IPUS)
    _check_count(where, "gradient_accumulation", gradient_accumulation)
    _check(where, schedule, forward=forward, backward=backward, update=update)
    return _Times.of(num_stages, schedule, forward, backward, update).use(gradient_accumulation)


def smallest_gradient_accumulation(
    num_stages: int,
    schedule: PipelineSchedule = PipelineSchedule.Default,
    *,
    use: float = 0.9,
    forward: float = 1.0,
    backward: float = 1.0,
    update: float = 0.0,
) -> int:
    """Return the smallest number of micro-batches with which a pipeline is used well enough.

    The number fits the schedule: it is a multiple of the micro-batches in flight, or for
    ``Default`` at least the number of stages, forward and backward.

    Args:
        num_stages: The number of stages, each on its own IPU (1 to 64).
        schedule: When stages run.
        use: The smallest accepted result of ``pipeline_use`` (a share between 0 and 1).
        forward: The time of a stage in the forward pass.
        backward: The time of a stage in the backward pass.
        update: The time of the weight update.

    Raises:
        UsageTypeError: As for ``pipeline_use``.
        UsageValueError: As for ``pipeline_use``, or no count is enough.
    """
    where = "smallest_gradient_accumulation"
    _check_count(where, "num_stages", num_stages, MAX_IPUS)
    _check(where, schedule, use=use, forward=forward, backward=backward, update=update)
    if not 0 < use < 1:
        raise UsageValueError(f"{where}: use is {use!r}. Pass a share between 0 and 1.")
    if schedule == PipelineSchedule.Default:
        step, least = 1, micro_batches_in_flight(schedule, num_stages, training=True)
    else:
        step = least = count_rule(schedule, num_stages, training=True)

    times = _Times.of(num_stages, schedule, forward, backward, update)
    limit = times.work / times.time
    if limit < use or (limit == use and times.fixed):
        raise UsageValueError(
            f"{where}: a pipeline of {num_stages} stages with PipelineSchedule.{schedule.name} is "
            f"used {limit:.0%} at most, which is less than the requested {use:.0%}. Pass a smaller "
            "use, or choose another schedule."
        )
    if limit == use:
        return least
    count = math.floor(use * times.fixed / (times.work - use * times.time))
    count = max(least, count // step * step)
    while times.use(count) < use:
        count += step
    return count


_Pair = tuple[int, int]
"""The numbers of forward and backward passes that an IPU runs at one time."""


@dataclass(frozen=True)
class _Times:
    """An update of ``g`` micro-batches takes ``g time + fixed``; each has ``work`` to do."""

    work: float
    time: float
    fixed: float

    @classmethod
    def of(
        cls, n: int, schedule: PipelineSchedule, forward: float, backward: float, update: float
    ) -> _Times:
        """Return the times of a schedule with ``n`` stages, computed from the schedule itself."""

        def seconds(pairs: frozenset[_Pair]) -> float:
            return max(forwards * forward + backwards * backward for forwards, backwards in pairs)

        full = 2 * n  # with this many micro-batches, all stages have had work at the same time
        once, twice = _count_times(schedule, n, full), _count_times(schedule, n, 2 * full)
        time = fixed = 0.0
        for pairs, count in twice.items():
            each = Fraction(count - once[pairs], full)  # for each micro-batch
            time += float(each) * seconds(pairs)
            fixed += float(once[pairs] - full * each) * seconds(pairs)
        return cls(forward + backward, time, fixed + update)

    def use(self, count: int) -> float:
        """Return the share of time in which a stage computes."""
        return count * self.work / (count * self.time + self.fixed)


def _count_times(schedule: PipelineSchedule, n: int, count: int) -> Counter[frozenset[_Pair]]:
    """Count the time slots of an update by their work; the busiest IPU determines the length.

    If slots are interleaved, each slot is long enough for either pass, and IPUs wait for the slower
    one.
    """
    found: Counter[frozenset[_Pair]] = Counter()
    for repeats, times in times_of(schedule, n, count):
        for actions in times:
            passes = Counter(re.split(r"(?<=[FB])", action)[0] for action in actions)
            pairs = {(passes[f"{stage}F"], passes[f"{stage}B"]) for stage in range(n)}
            if schedule == PipelineSchedule.Interleaved:
                pairs |= {(1, 0), (0, 1)}
            found[frozenset(pairs)] += repeats
    return found


def _check_count(where: str, name: str, value: object, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageTypeError(f"{where}: {name} is {value!r}. Pass an int.")
    if value < 1:
        raise UsageValueError(f"{where}: {name} is {value}. Pass 1 or more.")
    if most is not None and value > most:
        raise UsageValueError(
            f"{where}: {name} is {value}, and one process can use {most} IPUs. Pass {most} or less."
        )


def _check(where: str, schedule: object, **numbers: object) -> None:
    if not isinstance(schedule, PipelineSchedule):
        raise UsageTypeError(f"{where}: schedule is {schedule!r}. Pass a PipelineSchedule.")
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UsageTypeError(f"{where}: {name} is {value!r}. Pass a number.")
        if not 0 <= value < math.inf:
            raise UsageValueError(f"{where}: {name} is {value}. Pass 0 or more.")
    if not (numbers["forward"] or numbers["backward"]):
        raise UsageValueError(f"{where}: forward and backward are both 0.")
