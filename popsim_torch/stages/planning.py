"""How much of its time a pipeline computes, and how many micro-batches that takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.stages.schedules import PipelineSchedule, count_rule

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
    """Return the share of its time that a stage of a pipeline computes on micro-batches.

    The rest it waits, while the pipeline fills and drains, or updates weights. All stages take
    equally long; the times may have any unit.

    Args:
        num_stages: Stages, each on an IPU of its own (count).
        gradient_accumulation: Micro-batches per weight update (count).
        schedule: When stages run.
        forward: Time of a stage forward.
        backward: Time of a stage backward.
        update: Time of the weight update.

    Raises:
        UsageTypeError: A count is no int, a time no number, or the schedule none.
        UsageValueError: A count or a time is out of range.
    """
    where = "pipeline_use"
    _check_count(where, "num_stages", num_stages)
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
    """Return the smallest count of micro-batches with which a pipeline is used well enough.

    It is one that the schedule takes: a multiple of the micro-batches in flight, or for ``Default``
    as many as there are stages, forward and backward.

    Args:
        num_stages: Stages, each on an IPU of its own (count).
        schedule: When stages run.
        use: What ``pipeline_use`` is to be at least (share, between 0 and 1).
        forward: Time of a stage forward.
        backward: Time of a stage backward.
        update: Time of the weight update.

    Raises:
        UsageTypeError: As for ``pipeline_use``.
        UsageValueError: As for ``pipeline_use``, or no count is enough.
    """
    where = "smallest_gradient_accumulation"
    _check_count(where, "num_stages", num_stages)
    _check(where, schedule, use=use, forward=forward, backward=backward, update=update)
    if not 0 < use < 1:
        raise UsageValueError(f"{where}: use is {use!r}. Pass a share between 0 and 1.")
    step, least = 1, 2 * num_stages - 1
    if schedule != PipelineSchedule.Default:
        step = least = count_rule(schedule, num_stages, training=True)

    times = _Times.of(num_stages, schedule, forward, backward, update)
    limit = times.work / times.time
    if limit < use or (limit == use and times.fixed):
        raise UsageValueError(
            f"{where}: a pipeline of {num_stages} stages with PipelineSchedule.{schedule.name} is "
            f"used {limit:.0%} at most, and {use:.0%} are asked for. Ask for less, or choose "
            "another schedule."
        )
    if limit == use:
        return least
    count = math.floor(use * times.fixed / (times.work - use * times.time))
    count = max(least, count // step * step)
    while times.use(count) < use:
        count += step
    return count


@dataclass(frozen=True)
class _Times:
    """An update takes ``g time + fixed`` for ``g`` micro-batches, of which each is ``work``."""

    work: float
    time: float
    fixed: float

    @classmethod
    def of(
        cls, n: int, schedule: PipelineSchedule, forward: float, backward: float, update: float
    ) -> _Times:
        """Return the times of a schedule with ``n`` stages."""
        work = forward + backward
        if schedule == PipelineSchedule.Sequential:
            return cls(work, n * work, update)
        # While a pipeline fills there are only forward passes, while it drains only backward ones.
        slots = 2 * max(forward, backward) if schedule == PipelineSchedule.Interleaved else work
        return cls(work, slots, (n - 1) * slots + update)

    def use(self, count: int) -> float:
        """Return the share of the time that is work."""
        return count * self.work / (count * self.time + self.fixed)


def _check_count(where: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageTypeError(f"{where}: {name} is {value!r}. Pass an int.")
    if value < 1:
        raise UsageValueError(f"{where}: {name} is {value}. Pass 1 or more.")


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
