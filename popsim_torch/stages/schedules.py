"""The schedules that a pipeline can be asked for, and what each needs.

PopTorch has one of its own, in force where none is asked for: the last stage's backward follows its
forward at once, and there is a least number of micro-batches. The others are those of pipelines
in TensorFlow for IPUs.
"""

from __future__ import annotations

from collections.abc import Mapping

from popsim_torch.enums import NamedIntEnum
from popsim_torch.errors import Error
from popsim_torch.stages.strategies import ExecutionStrategy

__all__ = [
    "PipelineSchedule",
    "WrongNumberOfMicroBatches",
    "check_schedule",
    "count_rule",
    "schedule_name",
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


class PipelineSchedule(NamedIntEnum):
    """When the stages of a pipeline run; no value depends on it.

    A micro-batch takes a slot for each stage forward and one for each backward, ``2 n`` slots for
    ``n`` stages. The schedules differ in when the next micro-batch begins.
    """

    Grouped = 0
    """One slot later: all stages run forward together, then backward; ``2 n`` are in flight."""
    Interleaved = 1
    """Two slots later: a stage has one slot at a time; ``n`` micro-batches are in flight."""
    Sequential = 2
    """When the one before is done: one is in flight, as with ``ShardedExecution``."""
    Default = 3
    """Not chosen: PopTorch's pipeline, in which ``2 n - 2`` are in flight."""


def schedule_name(
    schedule: PipelineSchedule, strategy: ExecutionStrategy, *, num_stages: int, is_cut: bool
) -> str:
    """Return the name of the schedule that the program runs by.

    Args:
        schedule: What the options ask for.
        strategy: How blocks form stages.
        num_stages: Forward stages of the program.
        is_cut: Whether the model goes from one IPU to another.

    Raises:
        Error: The strategy runs stages one after another, and the schedule several at a time.
    """
    if schedule == PipelineSchedule.Default:
        return "pipelined" if is_cut and strategy.is_pipelined else "sequential"
    if schedule == PipelineSchedule.Sequential or num_stages == 1:
        return "sequential"
    if not strategy.is_pipelined:
        raise Error(
            f"Options.pipelineSchedule(PipelineSchedule.{schedule.name}): {strategy!r} runs the "
            "stages one after another. Choose PipelineSchedule.Sequential, or "
            "poptorch.PipelinedExecution with Options.setExecutionStrategy."
        )
    return schedule.name.lower()


def count_rule(schedule: PipelineSchedule, num_stages: int, *, training: bool) -> int:
    """Return what the number of micro-batches must be a multiple of.

    It is the number of micro-batches that are in flight: the rotations that a schedule uses of the
    ring of devices.

    Args:
        schedule: Not ``Default``.
        num_stages: Forward stages.
        training: Whether there are backward slots; without them no stage has two.
    """
    if schedule == PipelineSchedule.Sequential or num_stages == 1:
        return 1
    both = training and schedule == PipelineSchedule.Grouped
    return 2 * num_stages if both else num_stages


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
