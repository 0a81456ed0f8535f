"""What a tensor does not tell in public: its version, its hooks, and which memory it has.

Why: autograd counts the changes of a tensor to refuse stale ones, and shows no count. Hooks can be
added to a tensor and taken away by whoever added them, not listed. ``data_ptr`` is an error for
tensors without values, such as fake ones; two of them may share a storage all the same. And
``isinstance(x, nn.Parameter)`` asks a tensor of another class for a mark; ``nn.Parameter(x)`` gives
it to a detached copy of the tensor, not to the tensor.

Checked: 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "gradient_hooks",
    "has_hooks_behind",
    "pose_as_parameter",
    "storage_key",
    "version_of",
]


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor or a view of it was changed; inference tensors have no count."""
    return tensor._version


def gradient_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
    """Return what ``register_hook`` has added to a tensor, in order."""
    return list((tensor._backward_hooks or {}).values())


def has_hooks_behind(tensor: torch.Tensor) -> bool:
    """Whether a tensor has hooks that run when its gradient has been accumulated."""
    return bool(tensor._post_accumulate_grad_hooks)


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that tensors have in common whose memory is one, as long as they live."""
    return int(tensor.untyped_storage()._cdata)


def pose_as_parameter(tensor: torch.Tensor) -> None:
    """Let ``isinstance(tensor, nn.Parameter)`` be true."""
    tensor._is_param = True
