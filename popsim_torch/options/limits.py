"""Refuses settings of ``Options`` that this version does not support. Package private."""

from __future__ import annotations

from typing import TYPE_CHECKING

from popsim_torch.errors import not_supported_yet

if TYPE_CHECKING:
    from popsim_torch.options import Options


def num_replicas(options: Options) -> int:
    """Return the number of copies of a model that train together, in all processes."""
    return int(options.replication_factor) * options.Distributed.numProcesses


def check_limits(options: Options) -> None:
    """Check that this version can run models with some options.

    Args:
        options: The options of a model to wrap, or of a loop to compile.

    Raises:
        Error: The options need several replicas in a process.
    """
    replicas = options.replication_factor
    if replicas != 1:
        raise not_supported_yet(
            f"Options.replicationFactor({replicas!r})",
            "replication",
            "Remove the call or set it to 1.",
            "it runs one replica",
        )
