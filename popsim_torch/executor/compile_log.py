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
    for key, value in _computed_settings(options, pipelined=pipelined).items():
        logs.backend.debug("%s set to value %s", key, value)
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


def _computed_settings(options: Options, *, pipelined: bool) -> dict[str, object]:
    """Return the settings of the back end that follow from others, without those that are set."""
    strategy = options.execution_strategy
    settings: dict[str, object] = {"enablePipelining": int(pipelined)}
    if isinstance(strategy, SerialPhasedExecution | ParallelPhasedExecution):
        settings["executionPhaseSettings.phases"] = strategy.num_phases
        is_serial = isinstance(strategy, SerialPhasedExecution)
        settings["executionPhaseSettings.stages"] = 1 if is_serial else 2
        settings["location_weight"] = "useOnChipStorage(False)"
    given = options.toDict()
    return {key: value for key, value in settings.items() if key not in given}


def _place(options: Options, stage: int, ipu_of_stage: Mapping[int, int]) -> str:
    strategy, ipu = options.execution_strategy, ipu_of_stage.get(stage, 0)
    if isinstance(strategy, SerialPhasedExecution | ParallelPhasedExecution):
        phase_of_stage = [n for n, phase in enumerate(strategy.phases) for _ in phase.stages]
        phase = strategy.phase_id(phase_of_stage[stage]) if stage < len(phase_of_stage) else 0
        return f"mode(Phased), ipu({ipu}), phase({phase})"
    mode = "Sharded" if isinstance(strategy, ShardedExecution) else "Pipelined"
    return f"mode({mode}), ipu({ipu}), stage({stage})"
