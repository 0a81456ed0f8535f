"""Places a traced program: its schedule and its IPUs."""

from __future__ import annotations

from popsim_torch.enums import PipelineSchedule
from popsim_torch.ir import LoopCounts, is_pipelined
from popsim_torch.options import Options
from popsim_torch.options.back_end import log_computed
from popsim_torch.stages import (
    StageAssigner,
    check_pipeline,
    check_schedule,
    chosen_schedule,
    count_stages,
)

__all__ = ["place"]


def place(
    options: Options, stages: StageAssigner, loop: LoopCounts, *, training: bool
) -> tuple[PipelineSchedule, int]:
    """Check the stages of the trace, and choose schedule and IPUs.

    Args:
        options: The execution strategy and the schedule are read from here.
        stages: The stages of the trace.
        loop: How often a call runs the program.
        training: Whether it trains.

    Returns:
        The schedule of the program, and the number of IPUs that all replicas take.

    Raises:
        Error: Stages, schedule and counts do not fit together.
    """
    strategy = options.execution_strategy
    strategy.check_num_stages(stages.num_stages)
    positions = stages.positions
    depth = positions[-1] + 1 if positions else stages.num_stages
    num_stages = depth if positions else count_stages(stages.ipu_ids)
    asked_for = PipelineSchedule(options.pipeline_schedule)
    schedule = chosen_schedule(asked_for, strategy, num_stages=depth, is_cut=num_stages > 1)
    log_computed(options, pipelined=is_pipelined(schedule))
    check_schedule(
        asked_for,
        stages.ipu_of_stage,
        num_stages=depth,
        training=training,
        count=loop.gradient_accumulation if training else loop.device_iterations,
    )
    num_ipus = check_pipeline(
        num_stages if schedule == PipelineSchedule.Default else 1,
        stages.ipu_ids,
        strategy,
        training,
        loop.gradient_accumulation,
        loop.device_iterations,
        options.auto_round_num_ipus,
        loop.replicas,
    )
    return schedule, num_ipus
