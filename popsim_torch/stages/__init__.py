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
from popsim_torch.stages.checks import check_pipeline
from popsim_torch.stages.phased import ParallelPhasedExecution, Phase, SerialPhasedExecution
from popsim_torch.stages.printing import print
from popsim_torch.stages.strategies import (
    ExecutionStrategy,
    PipelinedExecution,
    ShardedExecution,
    Stage,
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
