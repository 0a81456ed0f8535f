"""What this version cannot carry out of settings that ``Options`` stores. Package private."""

from __future__ import annotations

from typing import TYPE_CHECKING

from popsim_torch.errors import not_supported_yet

if TYPE_CHECKING:
    from popsim_torch.options import Options


def check_limits(options: Options) -> None:
    """Check that models can be run with some options.

    Args:
        options: Those that a model is about to be wrapped with.

    Raises:
        Error: They ask for several replicas or several processes.
    """
    replicas = options.replication_factor
    if replicas != 1:
        raise not_supported_yet(
            f"Options.replicationFactor({replicas!r})",
            "replication",
            "Remove the call or set it to 1.",
            "it runs one replica",
        )
    processes = options.Distributed.numProcesses
    if processes > 1:
        raise not_supported_yet(
            f"Options.Distributed.configureProcessId({options.Distributed.processId}, {processes})",
            "a program of several processes",
            "Start one process: leave out the call, or the MPI launcher.",
            "it runs one process",
        )
