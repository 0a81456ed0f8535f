"""What a module has itself: parameters, buffers, modules, and hooks in front of its forward.

Why: ``named_parameters`` and the like also walk the modules inside, name what is there twice once,
and leave out what is None. Which buffers are not saved, and which hooks there are, they do not tell
at all. All of these are the module's own dictionaries: who changes them changes the module.

Checked: 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = [
    "forward_pre_hooks",
    "own_buffers",
    "own_modules",
    "own_parameters",
    "unsaved_buffers",
]


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own parameters by name; None for one that is registered and not there."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's own buffers by name; None for one that is registered and not there."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the modules that a module has itself, by name; None for one that is not there."""
    return module._modules


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that ``state_dict`` leaves out."""
    return module._non_persistent_buffers_set


def forward_pre_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Return the hooks that run in front of a module's forward, by the number of each."""
    return module._forward_pre_hooks
