"""Log messages about a compiled model."""

from __future__ import annotations

from collections.abc import Mapping

from popsim_torch import logs
from popsim_torch.dtypes import dtype_name
from popsim_torch.ir import Program, program_text
from popsim_torch.ir.graph import NO_TENSOR
from popsim_torch.options import Options
from popsim_torch.stages import ParallelPhasedExecution, SerialPhasedExecution, ShardedExecution


def log_program(
    program: Program,
    options: Options,
    ipu_of_stage: Mapping[int, int],
) -> None:
    """Write a line for each op of a lowered program, and its text at DEBUG_IR.

    Args:
        program: The program of the model.
        options: The options that the model is compiled with.
        ipu_of_stage: The IPU on which each stage runs.
    """
    if not logs.backend.isEnabledFor(logs.DEBUG):
        return
    for op in program.graph.ops:
        outputs = [tensor_id for tensor_id in op.outputs if tensor_id != NO_TENSOR]
        if not outputs:
            continue
        tensor = program.graph.tensors[outputs[0]]
        logs.backend.debug(
            "%s [%s(%s), %s]",
            tensor.name or op.name,
            dtype_name(tensor.dtype),
            ", ".join(map(str, tensor.shape)),
            _place(options, op.stage, ipu_of_stage),
        )
    if logs.backend.isEnabledFor(logs.DEBUG_IR):
        logs.backend.log(logs.DEBUG_IR, "%s", program_text(program))


def _place(options: Options, stage: int, ipu_of_stage: Mapping[int, int]) -> str:
    strategy, ipu = options.execution_strategy, ipu_of_stage.get(stage, 0)
    if isinstance(strategy, SerialPhasedExecution | ParallelPhasedExecution):
        phase_of_stage = [n for n, phase in enumerate(strategy.phases) for _ in phase.stages]
        phase = strategy.phase_id(phase_of_stage[stage]) if stage < len(phase_of_stage) else 0
        return f"mode(Phased), ipu({ipu}), phase({phase})"
    mode = "Sharded" if isinstance(strategy, ShardedExecution) else "Pipelined"
    return f"mode({mode}), ipu({ipu}), stage({stage})"
