"""The own parts of a module: parameters, buffers, modules, and hooks.

Why: ``named_parameters`` and similar methods also visit inner modules, list a repeated object once,
and skip None. They do not show which buffers are not saved, or which hooks there are. All results
are the module's own dictionaries: a change of them changes the module.

Checked: 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = [
    "forward_pre_hooks",
    "hooks_of",
    "num_hooks",
    "own_buffers",
    "own_modules",
    "own_parameters",
    "unsaved_buffers",
]


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own parameters by name; None for a registered parameter without value."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's own buffers by name; None for a registered buffer without value."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's own sub-modules by name; None for a registered one without value."""
    return module._modules


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that ``state_dict`` leaves out."""
    return module._non_persistent_buffers_set


def forward_pre_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """Return the hooks that run before a module's forward, by the number of each."""
    return module._forward_pre_hooks


def hooks_of(module: nn.Module) -> tuple[dict[int, Callable[..., Any]], ...]:
    """Return the hooks around a module's forward and backward, of each kind by number."""
    return (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )


def num_hooks() -> int:
    """Return how many hooks this process has ever registered, of anything."""
    return RemovableHandle.next_id
