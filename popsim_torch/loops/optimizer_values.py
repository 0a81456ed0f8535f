"""What the optimizers of a loop say, and whether that has changed since it was read."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch

from popsim_torch.optim.settings import structure_of

__all__ = ["OptimizerValues"]

_PARAMETERS = itemgetter("params")


class OptimizerValues:
    """The values that a program has of the optimizers that it steps.

    Args:
        optimizers: These.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._structure = [structure_of(one) for one in optimizers]
        self.note()

    def note(self) -> None:
        """Take note of what they say now: the program has that."""
        # The list of parameters is the optimizer's own, which is compared without a look inside.
        self._said = [
            ([dict(group) for group in one.param_groups], *_others(one)) for one in self._optimizers
        ]

    def changed(self) -> bool:
        """Return whether they say something else."""
        try:
            return [(one.param_groups, *_others(one)) for one in self._optimizers] != self._said
        except RuntimeError:  # a list of other tensors, which cannot be compared
            return True

    def fits(self) -> bool:
        """Return whether the program can take over what they say: it is of the same structure."""
        return self._structure == [structure_of(one) for one in self._optimizers]


def _others(optimizer: torch.optim.Optimizer) -> tuple[Any, list[int]]:
    """Return what stands in no group, and how many parameters each has."""
    scale = getattr(optimizer, "loss_scaling", None)
    return scale, list(map(len, map(_PARAMETERS, optimizer.param_groups)))
