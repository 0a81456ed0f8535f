"""What modules are like, where a recording of a function depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

from torch import nn

from popsim_torch.private_torch.modes import DisableTorchFunction

__all__ = ["ModuleKinds"]

_MODE, _LAYERS = itemgetter("training"), itemgetter("_modules")
_PARAMETERS = itemgetter("_parameters")
_IS_TRAINED = attrgetter("requires_grad")


class ModuleKinds:
    """The modes of modules, their layers and parameters, and which of these are trained.

    Asked in each call, of models of any size: it goes through the modules once, and compares in C.

    Args:
        modules: Each once, those within others included.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # A module's own dictionary stays the same; what it has under these names may not. (Modules
        # of TorchScript keep all that elsewhere, and never change.)
        self._own = [vars(module) for module in modules if "training" in vars(module)]
        with DisableTorchFunction():
            self._found, self._counts = self._look()
            self._parameters = [one for one in self._found if isinstance(one, nn.Parameter)]
            self._trained = list(map(_IS_TRAINED, self._parameters))

    def unchanged(self) -> bool:
        """Return whether all modules are still like they were."""
        with DisableTorchFunction():
            found, counts = self._look()
            return (
                counts == self._counts
                # (tensors are compared by identity: == would look at their values)
                and all(map(is_, found, self._found))
                and list(map(_IS_TRAINED, self._parameters)) == self._trained
            )

    def _look(self) -> tuple[list[Any], list[int]]:
        """Return modes, layers and parameters in a row, and how many each module has."""
        own = self._own
        held = [*map(_LAYERS, own), *map(_PARAMETERS, own)]
        found = [*map(_MODE, own), *chain.from_iterable(map(dict.values, held))]
        return found, list(map(len, held))
