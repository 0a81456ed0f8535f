"""Reads the options that concern a program."""

from __future__ import annotations

from popsim_torch.enums import OutputMode, PipelineSchedule
from popsim_torch.executor.numerics import Numerics
from popsim_torch.ir import LoopCounts, is_pipelined
from popsim_torch.lowering import HalfPartials
from popsim_torch.options import Options
from popsim_torch.passes.pipeline import ProgramRequest
from popsim_torch.passes.recompute_choice import Recomputation
from popsim_torch.passes.returns import ReturnRequest
from popsim_torch.stages import StageAssigner

__all__ = ["half_partials", "program_request"]


def half_partials(options: Options) -> HalfPartials:
    """Return which products of float16 operands accumulate in float16."""
    popart = options._Popart
    return HalfPartials(
        matmul=popart.matmul_partials == "half", convolution=popart.convolution_partials == "half"
    )


def program_request(
    options: Options,
    loop: LoopCounts,
    stages: StageAssigner,
    numerics: Numerics,
    *,
    training: bool,
    schedule: PipelineSchedule,
) -> ProgramRequest:
    """Return the requests of the options to the program, except anchors.

    Args:
        options: The options, with a resolved output mode.
        loop: How often a call runs the program.
        stages: The stages of the trace.
        numerics: The options that concern numbers.
        training: Whether it trains.
        schedule: The order in which micro-batches run.
    """
    pipelined = is_pipelined(schedule)
    mode, period = OutputMode(options.output_mode), options.output_return_period
    return ProgramRequest(
        _recomputation(options, training=training, pipelined=pipelined),
        ReturnRequest(loop, mode, period, pipelined),
        stages.ipu_of_stage,
        stages.positions,
        stochastic_rounding=numerics.stochastic_rounding,
        synthetic_data=numerics.synthetic_data,
        last_stage_turns=schedule == PipelineSchedule.Default,
    )


def _recomputation(options: Options, *, training: bool, pipelined: bool) -> Recomputation:
    """Return which forward values are recomputed: by the options, or by default for a pipeline."""
    if not training:
        return Recomputation.NONE
    default = Recomputation.PIPELINE if pipelined else Recomputation.NONE
    return Recomputation(options._Popart.options.get("autoRecomputation", default))
