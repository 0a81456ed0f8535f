"""How many replicas train a model, and where there may be only one. Package private."""

from __future__ import annotations

from typing import TYPE_CHECKING

from popsim_torch.errors import not_supported_yet

if TYPE_CHECKING:
    from popsim_torch.options import Options


def num_replicas(options: Options) -> int:
    """Return the number of copies of a model that train together, in all processes."""
    return int(options.replication_factor) * options.Distributed.numProcesses


def check_one_replica(options: Options, function: str) -> None:
    """Check that a loop that carries values, or that a value ends, runs in one replica.

    Args:
        options: The options of the loop.
        function: The name of the function that makes the loop.

    Raises:
        Error: The options need several replicas in a process.
    """
    replicas = options.replication_factor
    if replicas != 1:
        raise not_supported_yet(
            f"{function} with Options.replicationFactor({replicas!r})",
            "a loop that carries values, or that a value ends, on several replicas",
            "Put values into an OutfeedQueue instead, or start several processes with torchrun.",
            "it runs one replica in each process",
        )
