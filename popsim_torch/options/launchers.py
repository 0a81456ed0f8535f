"""Reads the environment variables that launchers set for each process. Package private."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Launched", "launched"]

MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
"""The variables of PopTorch's own launcher."""

_LAUNCHERS = (
    MPI,
    ("RANK", "WORLD_SIZE"),  # torchrun
    ("PMI_RANK", "PMI_SIZE"),  # MPICH and similar launchers
    # Only in a step (``srun``): a batch script is one process, even if SLURM_NTASKS is larger.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


@dataclass(frozen=True)
class Launched:
    """The ID of this process, the number of processes, and the variables that hold them."""

    rank: int
    size: int
    variables: tuple[str, str]


def launched() -> Launched | None:
    """Return the values of the first launcher with several processes; None if there is none.

    Two variables are ignored if they do not hold a count and an ID below the count, because other
    programs also use names such as ``RANK``.
    """
    for names in _LAUNCHERS:
        texts = [os.environ.get(name, "").strip() for name in names]
        if not all(text.isascii() and text.isdigit() for text in texts):
            continue
        rank, size = map(int, texts)
        if size > 1 and rank < size:
            return Launched(rank, size, names)
    return None
