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
        self._own = own = [vars(module) for module in modules if "training" in vars(module)]
        self._modes = list(map(_MODE, own))
        self._layers = list(map(_LAYERS, own))
        self._parameters = list(map(_PARAMETERS, own))
        # Most modules have no layers: whether they still have none is the cheaper question.
        held: list[dict[str, Any]] = [*self._layers, *self._parameters]
        self._empty = [one for one in held if not one]
        self._filled = [one for one in held if one]
        self._counts = list(map(len, self._filled))
        self._views = [one.values() for one in self._filled]
        self._found = list(chain.from_iterable(self._views))
        self._tensors = [one for one in self._found if isinstance(one, nn.Parameter)]
        with DisableTorchFunction():
            self._trained = list(map(_IS_TRAINED, self._tensors))

    def unchanged(self) -> bool:
        """Return whether all modules are still like they were."""
        own = self._own
        if not own:
            return True
        if not (
            list(map(_MODE, own)) == self._modes
            and all(map(is_, map(_LAYERS, own), self._layers))
            and all(map(is_, map(_PARAMETERS, own), self._parameters))
            and not any(self._empty)
            and list(map(len, self._filled)) == self._counts
            # (tensors are compared by identity: == would look at their values)
            and all(map(is_, chain.from_iterable(self._views), self._found))
        ):
            return False
        with DisableTorchFunction():
            return list(map(_IS_TRAINED, self._tensors)) == self._trained
