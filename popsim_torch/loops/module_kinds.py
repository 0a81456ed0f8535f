"""The properties of modules on which the recording of a function depends."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from popsim_torch import _native
from popsim_torch.private_torch.module_parts import own_modules, own_parameters

__all__ = ["ModuleKinds"]


class ModuleKinds:
    """The modes of modules, their layers and parameters, and which of these are trained.

    Each call checks it, for models of any size, so it must be fast.

    Args:
        modules: The modules, each once, with those inside of others.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # The dictionary of a module stays the same object, but the values under these names may
        # change. (Modules of TorchScript keep all that elsewhere, and never change.)
        self._own = [vars(module) for module in modules if "training" in vars(module)]
        # Object ids are only unique while the objects are alive.
        self._kept = [
            (part, *part.values())
            for module in modules
            if "training" in vars(module)
            for part in (own_modules(module), own_parameters(module))
        ]
        self._marks = _native.module_marks(self._own)

    def unchanged(self) -> bool:
        """Return whether all modules still have the same properties."""
        return _native.module_marks(self._own) == self._marks
