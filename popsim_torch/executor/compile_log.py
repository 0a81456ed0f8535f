"""What the log says of a model that is compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from popsim_torch import logs
from popsim_torch.anchors import AnchorRequest
from popsim_torch.dtypes import dtype_name
from popsim_torch.enums import OutputMode
from popsim_torch.ir import Program, program_text
from popsim_torch.ir.graph import NO_TENSOR
from popsim_torch.options import Options
from popsim_torch.options.log import log_options
from popsim_torch.stages import ParallelPhasedExecution, SerialPhasedExecution, ShardedExecution

_MODES = {
    OutputMode.All: "ALL",
    OutputMode.Final: "FINAL",
    OutputMode.EveryN: "EVERYN",
    OutputMode.Sum: "Sum",
}


def log_request(options: Options) -> None:
    """Write what a compilation is asked for, and count repeated warnings anew."""
    logs.limit_repeats(options.max_repeat_logs)
    if options.exists("use_model"):
        choice = "Enabled" if options("use_model") else "Disabled"
        logs.backend.info("From the user configuration: Ipu model: %s", choice)
    if logs.backend.isEnabledFor(logs.DEBUG):
        log_options(options.toDict())


def log_program(
    program: Program,
    options: Options,
    anchors: Sequence[AnchorRequest],
    ipu_of_stage: Mapping[int, int],
    *,
    pipelined: bool,
) -> None:
    """Write a line for each anchor and each op of a lowered program, and its text at DEBUG_IR.

    Args:
        program: The model's.
        options: Those that it is compiled with.
        anchors: What is recorded, each with a mode of its own.
        ipu_of_stage: The IPU on which each stage runs.
        pipelined: Whether micro-batches overlap in a pipeline of several stages.
    """
    if not logs.backend.isEnabledFor(logs.DEBUG):
        return
    if "enablePipelining" not in options._Popart.options:
        logs.backend.debug("enablePipelining set to value %d", pipelined)
    for anchor in anchors:
        logs.backend.debug("%s %s/%d", anchor.long_name, _MODES[anchor.output_mode], anchor.period)
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
        return f"mode(Phased), ipu({ipu}), phase({stage})"
    mode = "Sharded" if isinstance(strategy, ShardedExecution) else "Pipelined"
    return f"mode({mode}), ipu({ipu}), stage({stage})"
