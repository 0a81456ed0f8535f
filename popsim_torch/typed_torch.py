"""Adds type annotations to public functions of PyTorch that have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["apply", "broadcast_shapes", "new_library"]

new_library: Callable[[str, str], Any] = torch.library.Library
broadcast_shapes: Callable[..., torch.Size] = torch.broadcast_shapes


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Return the results of an autograd function, which has its own gradient."""
    untyped: Any = function
    return untyped.apply(*arguments)
