"""What launchers of several processes say in the environment of each. Package private."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Launched", "launched"]

MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
"""The variables of PopTorch's own launcher."""

_LAUNCHERS = (
    MPI,
    ("RANK", "WORLD_SIZE"),  # torchrun
    ("PMI_RANK", "PMI_SIZE"),  # MPICH and its relatives
    # Inside of a step only (``srun``): a batch script is one process, whatever SLURM_NTASKS says.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


@dataclass(frozen=True)
class Launched:
    """Which process of how many this one is, and which variables say so."""

    rank: int
    size: int
    variables: tuple[str, str]


def launched() -> Launched | None:
    """Return what the first launcher says that has started several processes; None without one.

    Two variables that do not hold a number and a count that it is below are no launcher's: others
    use names such as ``RANK``, too.
    """
    for names in _LAUNCHERS:
        texts = [os.environ.get(name, "").strip() for name in names]
        if not all(text.isascii() and text.isdigit() for text in texts):
            continue
        rank, size = map(int, texts)
        if size > 1 and rank < size:
            return Launched(rank, size, names)
    return None
