"""The settings of a loop's optimizers, and whether they have changed since they were read."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch

from popsim_torch.optim.settings import structure_of

__all__ = ["OptimizerValues"]

_PARAMETERS = itemgetter("params")


class OptimizerValues:
    """The optimizer values that a program was given.

    Args:
        optimizers: The optimizers that the program steps.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._structure = [structure_of(one) for one in optimizers]
        self.note()

    def note(self) -> None:
        """Record the present values: the program has them."""
        # The list of parameters belongs to the optimizer; it is compared by identity only.
        self._said = [
            ([dict(group) for group in one.param_groups], *_others(one)) for one in self._optimizers
        ]

    def changed(self) -> bool:
        """Return whether a value differs now."""
        try:
            return [(one.param_groups, *_others(one)) for one in self._optimizers] != self._said
        except RuntimeError:  # a list with other tensors, which cannot be compared
            return True

    def fits(self) -> bool:
        """Return whether the program can take over the present values: same structure."""
        return self._structure == [structure_of(one) for one in self._optimizers]


def _others(optimizer: torch.optim.Optimizer) -> tuple[Any, list[int]]:
    """Return the values outside of the groups, and the number of parameters in each group."""
    scale = getattr(optimizer, "loss_scaling", None)
    return scale, list(map(len, map(_PARAMETERS, optimizer.param_groups)))
