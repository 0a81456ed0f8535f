"""``poptorch.print``: as the built-in function, but shows modules with their blocks."""

from __future__ import annotations

import builtins
from typing import Any

from torch import nn

from popsim_torch.stages.blocks import module_repr

__all__ = ["print"]


def print(*values: Any, **kwargs: Any) -> None:
    """Print values as the built-in ``print`` does, but modules as ``module_repr`` shows them.

    Args:
        *values: The values to print.
        **kwargs: ``sep``, ``end``, ``file`` and ``flush`` of the built-in function.
    """
    shown = [module_repr(value) if isinstance(value, nn.Module) else value for value in values]
    builtins.print(*shown, **kwargs)
