"""Refuses settings of ``Options`` that this version does not support. Package private."""

from __future__ import annotations

from typing import TYPE_CHECKING

from popsim_torch.errors import not_supported_yet
from popsim_torch.options.launchers import launched

if TYPE_CHECKING:
    from popsim_torch.options import Options


def check_limits(options: Options) -> None:
    """Check that this version can run models with some options.

    Args:
        options: The options of a model to wrap, or of a loop to compile.

    Raises:
        Error: The options need several processes.
    """
    rank, size = options.Distributed.processId, options.Distributed.numProcesses
    if size <= 1:
        return
    found = launched()
    if found is not None and (found.rank, found.size) == (rank, size):
        names = zip(found.variables, (rank, size), strict=True)
        call = f"Options.Distributed ({', '.join(f'{name}={value}' for name, value in names)})"
        without = "the launcher"
    else:
        call = f"Options.Distributed.configureProcessId({rank}, {size})"
        without = "the call"
    raise not_supported_yet(
        call,
        "a program of several processes",
        f"Start one process, without {without}; or call options.Distributed.disable() if each "
        "process is to work by itself, with weights of its own and all data.",
        "it runs one process",
    )
