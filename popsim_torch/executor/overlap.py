"""Checks the options of models whose inputs or outputs overlap with computation."""

from __future__ import annotations

from popsim_torch.enums import OutputMode
from popsim_torch.errors import Error
from popsim_torch.options import Options

_MODES = (OutputMode.All, OutputMode.Sum)


def check_overlap(options: Options) -> None:
    """Check the options of a model with inputs or outputs that overlap with computation.

    Args:
        options: The options, with a resolved output mode.

    Raises:
        Error: The strategy, the number of IO tiles or the output mode do not allow overlap.
    """
    function = "poptorch.set_overlap_for_input or set_overlap_for_output"
    if options.execution_strategy.is_pipelined:
        raise Error(
            f"Overlapped IO is not supported with poptorch.PipelinedExecution ({function}). Use "
            "another strategy, such as options.setExecutionStrategy(poptorch.ShardedExecution())."
        )
    locations = options.TensorLocations
    if not locations.exists("numIOTiles"):
        raise Error(
            f"No IO tiles allocated for {function}: it needs at least 32. Call "
            "options.TensorLocations.numIOTiles(32)."
        )
    mode = OutputMode(options.output_mode)
    if mode not in _MODES:
        raise Error(
            f"Unsupported output mode {mode.name} for {function}: use "
            "options.outputMode(poptorch.OutputMode.All) or Sum."
        )
