"""Blocks, stages and execution strategies, with which the user divides a model into parts."""

from popsim_torch.stages.assignment import (
    assigned_stages,
    get_pipeline_stage_assignment,
    num_assignments,
    reset_pipeline_stage_assignment,
    set_pipeline_stage_assignment,
)
from popsim_torch.stages.balance import balanced_pipeline_stages
from popsim_torch.stages.blocks import (
    BeginBlock,
    Block,
    BlockFunction,
    BlockListener,
    StageAssigner,
    block_listener,
    module_repr,
    removeBlocks,
)
from popsim_torch.stages.checks import check_pipeline
from popsim_torch.stages.concurrent import ConcurrentExecution, flat_positions
from popsim_torch.stages.layers import PipelineStageRecord
from popsim_torch.stages.phased import ParallelPhasedExecution, Phase, SerialPhasedExecution
from popsim_torch.stages.pipeline_stage import PipelineStage
from popsim_torch.stages.planning import pipeline_use, smallest_gradient_accumulation
from popsim_torch.stages.printing import print
from popsim_torch.stages.schedules import (
    WrongNumberOfMicroBatches,
    check_schedule,
    chosen_schedule,
    count_rule,
    in_flight_rule,
    native_name,
)
from popsim_torch.stages.strategies import (
    ExecutionStrategy,
    PipelinedExecution,
    ShardedExecution,
    Stage,
    count_stages,
)
from popsim_torch.stages.summary import print_pipeline_stage_assignment_summary

__all__ = [
    "BeginBlock",
    "Block",
    "BlockFunction",
    "BlockListener",
    "ConcurrentExecution",
    "ExecutionStrategy",
    "ParallelPhasedExecution",
    "Phase",
    "PipelineStage",
    "PipelineStageRecord",
    "PipelinedExecution",
    "SerialPhasedExecution",
    "ShardedExecution",
    "Stage",
    "StageAssigner",
    "WrongNumberOfMicroBatches",
    "assigned_stages",
    "balanced_pipeline_stages",
    "block_listener",
    "check_pipeline",
    "check_schedule",
    "chosen_schedule",
    "count_rule",
    "count_stages",
    "flat_positions",
    "get_pipeline_stage_assignment",
    "in_flight_rule",
    "module_repr",
    "native_name",
    "num_assignments",
    "pipeline_use",
    "print",
    "print_pipeline_stage_assignment_summary",
    "removeBlocks",
    "reset_pipeline_stage_assignment",
    "set_pipeline_stage_assignment",
    "smallest_gradient_accumulation",
]
