"""Where numbers can be watched."""

from __future__ import annotations

from popsim_torch.errors import not_supported_yet
from popsim_torch.options import Options

__all__ = ["check_watching"]


def check_watching(options: Options, *, is_loop: bool) -> None:
    """Refuse to watch where an iteration cannot be repeated.

    Args:
        options: The options of the program.
        is_loop: Whether it is a loop of a function.

    Raises:
        Error: It is such a program.
    """
    if options._watching is None:
        return
    if is_loop:
        raise not_supported_yet(
            "Options.watch",
            "a loop of poptorch.function, pipeline or fit",
            "Use Precision.enableFloatingPointExceptions there, or call a trainingModel in a loop.",
        )
    if options.Distributed.numProcesses > 1:
        raise not_supported_yet(
            "Options.watch",
            "training in several processes",
            "Watch in a run of one process, or use Precision.enableFloatingPointExceptions.",
        )
