"""The schedules of a pipeline, and the requirements of each.

If no schedule is chosen, PopTorch's own is used: the backward pass of the last stage follows its
forward pass at once, and there is a smallest number of micro-batches. The other schedules are those
of pipelines in TensorFlow for IPUs.

Only the device's library defines the order of actions in a schedule (``csrc/schedule``). This
module computes the requirements from that order.
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
    """A pipeline cannot run with the given number of micro-batches.

    Attributes:
        rule: The required number, such as "at least 3".
        near: A valid number that is close.
    """

    def __init__(self, rule: str, near: int, message: str) -> None:
        super().__init__(message)
        self.rule, self.near = rule, near


def chosen_schedule(
    schedule: PipelineSchedule, strategy: ExecutionStrategy, *, num_stages: int, is_cut: bool
) -> PipelineSchedule:
    """Return the schedule of the program, where ``Default`` means PopTorch's pipeline.

    Args:
        schedule: The schedule in the options.
        strategy: How blocks form stages.
        num_stages: The number of forward stages of the program.
        is_cut: Whether the model uses several IPUs.

    Raises:
        Error: The strategy runs stages one after another, but the schedule runs several at a time.
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
    """Return the device library's name of a schedule."""
    return "pipelined" if schedule == PipelineSchedule.Default else schedule.name.lower()


def micro_batches_in_flight(schedule: PipelineSchedule, num_stages: int, *, training: bool) -> int:
    """Return how many micro-batches are in flight at a time, if there are enough.

    Args:
        schedule: The schedule of the program.
        num_stages: The number of forward stages.
        training: Whether there are backward slots; without them no stage has two slots.
    """
    enough = 2 * num_stages  # a slot each
    return _native.max_in_flight(native_name(schedule), num_stages, enough, training)


def times_of(
    schedule: PipelineSchedule, num_stages: int, num_micro_batches: int
) -> list[tuple[int, list[list[str]]]]:
    """Return the actions at each time slot of a weight update, except the update itself.

    Args:
        schedule: The schedule of the program.
        num_stages: The number of forward stages, each on its own IPU.
        num_micro_batches: The number of micro-batches per weight update.

    Returns:
        Sequences of time slots. Each has the number of its repetitions, which advance by one
        micro-batch each, and its slots: for each slot the actions that run in it, such as ``2F0``.
    """
    name = native_name(schedule)
    return _native.schedule_times(name, num_stages, num_micro_batches, True)[:-1]


def count_rule(schedule: PipelineSchedule, num_stages: int, *, training: bool) -> int:
    """Return the number of which the number of micro-batches must be a multiple.

    It is the number of micro-batches in flight: the rotations of the ring of devices that a
    schedule uses.

    Args:
        schedule: Any schedule except ``Default``.
        num_stages: The number of forward stages.
        training: Whether there are backward slots.
    """
    if num_stages == 1:
        return 1  # one stage cannot overlap with others
    return micro_batches_in_flight(schedule, num_stages, training=training)


def in_flight_rule(schedule: PipelineSchedule) -> str:
    """Return a phrase for how many micro-batches are in flight in training with ``n`` stages.

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
    """Check that a model can run with the chosen schedule.

    Args:
        schedule: The schedule; ``check_pipeline`` checks ``Default``.
        ipu_of_stage: The IPU of each stage.
        num_stages: The number of forward stages.
        training: Whether the backward stages run, too.
        count: The number of micro-batches per weight update; in inference per call.

    Raises:
        Error: The number of micro-batches is not a multiple of the number that the schedule needs,
            or two stages share an IPU in training with ``Interleaved``.
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
