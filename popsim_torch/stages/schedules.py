"""The schedules that a pipeline can be asked for, and what each needs.

PopTorch has one of its own, in force where none is asked for: the last stage's backward follows its
forward at once, and there is a least number of micro-batches. The others are those of pipelines
in TensorFlow for IPUs.

Which order each of them is, the device's library alone knows (``csrc/schedule``). What a schedule
needs is read off it here.
"""

from __future__ import annotations

from collections.abc import Mapping

from popsim_torch import _native
from popsim_torch.enums import PipelineSchedule
from popsim_torch.errors import Error
from popsim_torch.stages.strategies import ExecutionStrategy

__all__ = [
    "WrongNumberOfMicroBatches",
    "check_schedule",
    "chosen_schedule",
    "count_rule",
    "in_flight_rule",
    "micro_batches_in_flight",
    "native_name",
    "times_of",
]


class WrongNumberOfMicroBatches(Error):
    """A pipeline cannot run with the micro-batches that it is given.

    Attributes:
        rule: What it needs, such as "at least 3".
        near: A count that does.
    """

    def __init__(self, rule: str, near: int, message: str) -> None:
        super().__init__(message)
        self.rule, self.near = rule, near


def chosen_schedule(
    schedule: PipelineSchedule, strategy: ExecutionStrategy, *, num_stages: int, is_cut: bool
) -> PipelineSchedule:
    """Return the schedule that the program runs by; ``Default`` is then PopTorch's pipeline.

    Args:
        schedule: What the options ask for.
        strategy: How blocks form stages.
        num_stages: Forward stages of the program.
        is_cut: Whether the model goes from one IPU to another.

    Raises:
        Error: The strategy runs stages one after another, and the schedule several at a time.
    """
    if schedule == PipelineSchedule.Default:
        overlaps = is_cut and strategy.is_pipelined
        return PipelineSchedule.Default if overlaps else PipelineSchedule.Sequential
    if schedule == PipelineSchedule.Sequential or num_stages == 1:
        return PipelineSchedule.Sequential
    if not strategy.is_pipelined:
        raise Error(
            f"Options.pipelineSchedule(PipelineSchedule.{schedule.name}): {strategy!r} runs the "
            "stages one after another. Choose PipelineSchedule.Sequential, or "
            "poptorch.PipelinedExecution with Options.setExecutionStrategy."
        )
    return schedule


def native_name(schedule: PipelineSchedule) -> str:
    """Return what the device's library calls a schedule."""
    return "pipelined" if schedule == PipelineSchedule.Default else schedule.name.lower()


def micro_batches_in_flight(schedule: PipelineSchedule, num_stages: int, *, training: bool) -> int:
    """Return how many micro-batches are under way at a time, where there are enough.

    Args:
        schedule: The schedule that the program runs by.
        num_stages: Forward stages.
        training: Whether there are backward slots; without them no stage has two.
    """
    enough = 2 * num_stages  # a slot each
    return _native.max_in_flight(native_name(schedule), num_stages, enough, training)


def times_of(
    schedule: PipelineSchedule, num_stages: int, num_micro_batches: int
) -> list[tuple[int, list[list[str]]]]:
    """Return what runs at each time of a weight update, but the update itself.

    Args:
        schedule: The schedule that the program runs by.
        num_stages: Forward stages, each on an IPU of its own.
        num_micro_batches: Per weight update (count).

    Returns:
        Stretches of times: how often each repeats, one micro-batch further every time, and its
        times, each the actions that run then, such as ``2F0``.
    """
    name = native_name(schedule)
    return _native.schedule_times(name, num_stages, num_micro_batches, True)[:-1]


def count_rule(schedule: PipelineSchedule, num_stages: int, *, training: bool) -> int:
    """Return what the number of micro-batches must be a multiple of.

    It is the number of micro-batches that are in flight: the rotations that a schedule uses of the
    ring of devices.

    Args:
        schedule: Not ``Default``.
        num_stages: Forward stages.
        training: Whether there are backward slots.
    """
    if num_stages == 1:
        return 1  # there is nothing to overlap
    return micro_batches_in_flight(schedule, num_stages, training=training)


def in_flight_rule(schedule: PipelineSchedule) -> str:
    """Return in words how many micro-batches are in flight in training with ``n`` stages.

    Args:
        schedule: ``Grouped`` or ``Interleaved``.
    """
    factor = micro_batches_in_flight(schedule, 1, training=True)
    return "n" if factor == 1 else f"{factor} n"


def check_schedule(
    schedule: PipelineSchedule,
    ipu_of_stage: Mapping[int, int],
    *,
    num_stages: int,
    training: bool,
    count: int,
) -> None:
    """Check that a model can run by a schedule that was asked for.

    Args:
        schedule: The schedule; ``Default`` has a rule of its own (``check_pipeline``).
        ipu_of_stage: The IPU of each stage.
        num_stages: Forward stages.
        training: Whether the backward stages run too.
        count: Micro-batches per weight update; in inference those of a call.

    Raises:
        Error: The number of micro-batches is no multiple of what the schedule needs, or it is
            ``Interleaved``, training, and two stages share an IPU.
    """
    if training and schedule == PipelineSchedule.Interleaved:
        _check_own_devices(ipu_of_stage)
    if schedule == PipelineSchedule.Default:
        return
    step = count_rule(schedule, num_stages, training=training)
    if count > 0 and count % step == 0:
        return
    below = count // step * step
    near = f"{below} or {below + step}" if below > 0 else f"{step}"
    if training:
        what = "the gradient accumulation count"
        where = (
            "Options.Training.gradientAccumulation, or gradient_accumulation_steps_per_replica of "
            "set_pipelining_options, or gradient_accumulation_count of poptorch.pipeline"
        )
    else:
        what, where = "the number of device iterations", "Options.deviceIterations"
    raise WrongNumberOfMicroBatches(
        f"a multiple of {step}",
        below + step,
        f"PipelineSchedule.{schedule.name} with {num_stages} stages: {what} must be a positive "
        f"multiple of {step}, the micro-batches in flight, and is {count}. Set it to {near}: it is "
        f"{where}.",
    )


def _check_own_devices(ipu_of_stage: Mapping[int, int]) -> None:
    stage_of: dict[int, int] = {}
    for stage, ipu in sorted(ipu_of_stage.items()):
        other = stage_of.setdefault(ipu, stage)
        if other != stage:
            raise Error(
                f"PipelineSchedule.Interleaved: the stages {other} and {stage} are both on IPU "
                f"{ipu}. In training no device can have two stages: give each an IPU of its own "
                "(device_mapping), or choose PipelineSchedule.Grouped or Sequential."
            )
