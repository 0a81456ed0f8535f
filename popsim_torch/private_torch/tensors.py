"""Tensor data without a public interface: the version, the hooks, the memory, and its owner.

Why: autograd counts the changes of a tensor to refuse outdated ones, but does not show the count.
Hooks can be added to a tensor and removed with their handle, but not listed. ``data_ptr`` raises an
error for tensors without values, such as fake ones, although two of them may share a storage. A
view does not tell the tensor that it is a view of. And
``isinstance(x, nn.Parameter)`` checks a tensor of another class for a mark; ``nn.Parameter(x)``
sets it on a detached copy of the tensor, not on the tensor.

Checked: 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from popsim_torch.private_torch.modes import DisableTorchFunction

__all__ = [
    "ask_for_gradient",
    "asks_for_gradient",
    "base_of",
    "gradient_hooks",
    "hooks_behind",
    "pose_as_parameter",
    "storage_key",
    "version_of",
]


def base_of(view: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor whose memory a view shows, for autograd; None for other tensors."""
    return view._base


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor or its views were changed; inference tensors have no count: 0."""
    return 0 if tensor.is_inference() else tensor._version


def gradient_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
    """Return the hooks that ``register_hook`` has added to a tensor, in order."""
    return list((tensor._backward_hooks or {}).values())


def hooks_behind(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
    """Return the hooks that run after the accumulation of a tensor's gradient, in order."""
    return list((tensor._post_accumulate_grad_hooks or {}).values())


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that is equal for living tensors with the same memory."""
    with DisableTorchFunction():  # a trace refuses the user's calls of untyped_storage
        return int(tensor.untyped_storage()._cdata)


def pose_as_parameter(tensor: torch.Tensor, *, requires_grad: bool = True) -> None:
    """Make ``isinstance(tensor, nn.Parameter)`` true.

    Args:
        tensor: The tensor.
        requires_grad: Whether the parameter has a gradient where gradients are recorded.
    """
    tensor._is_param = True
    ask_for_gradient(tensor, requires_grad)


def ask_for_gradient(tensor: torch.Tensor, requires_grad: bool) -> None:
    """Set ``requires_grad`` of the parameter that a tensor poses as."""
    tensor._requires_grad_of_parameter = requires_grad  # type: ignore[attr-defined]


def asks_for_gradient(tensor: torch.Tensor) -> bool:
    """Return ``requires_grad`` of the parameter that a tensor poses as."""
    return bool(getattr(tensor, "_requires_grad_of_parameter", False))
