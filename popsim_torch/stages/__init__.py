"""Blocks, stages and execution strategies: how the user cuts a model into parts."""

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
from popsim_torch.stages.printing import print
from popsim_torch.stages.strategies import (
    ExecutionStrategy,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
    check_pipeline,
    count_stages,
)

__all__ = [
    "BeginBlock",
    "Block",
    "BlockFunction",
    "BlockListener",
    "ExecutionStrategy",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "SerialPhasedExecution",
    "ShardedExecution",
    "Stage",
    "StageAssigner",
    "block_listener",
    "check_pipeline",
    "count_stages",
    "module_repr",
    "print",
    "removeBlocks",
]
