"""What modules are like, where a recording of a function depends on it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from popsim_torch import _native
from popsim_torch.private_torch.module_parts import own_modules, own_parameters

__all__ = ["ModuleKinds"]


class ModuleKinds:
    """The modes of modules, their layers and parameters, and which of these are trained.

    Asked in each call, of models of any size.

    Args:
        modules: Each once, those within others included.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # A module's own dictionary stays the same; what it has under these names may not. (Modules
        # of TorchScript keep all that elsewhere, and never change.)
        self._own = [vars(module) for module in modules if "training" in vars(module)]
        # Identities tell objects apart only as long as these live.
        self._kept = [
            (part, *part.values())
            for module in modules
            if "training" in vars(module)
            for part in (own_modules(module), own_parameters(module))
        ]
        self._marks = _native.module_marks(self._own)

    def unchanged(self) -> bool:
        """Return whether all modules are still like they were."""
        return _native.module_marks(self._own) == self._marks
