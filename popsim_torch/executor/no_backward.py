"""What ``backward()`` says of a tensor that a compiled model returned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from popsim_torch.errors import UsageRuntimeError

__all__ = ["explain_backward"]


@functools.cache
def explain_backward() -> None:
    """Let ``Tensor.backward`` say more where it fails for want of a gradient; once is enough.

    What a model returns are plain tensors without history, and PyTorch says of those that they do
    not require a gradient. Nothing tells them from others of the kind, and to mark them would cost
    every call; so the hint stands in the error for all of them, which is raised anyway. It is a
    ``RuntimeError`` with PyTorch's text as before, and an ``Error`` as well.
    """
    original: Callable[..., None] = torch.Tensor.backward

    @functools.wraps(original)
    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        except RuntimeError as error:
            explained = isinstance(error, UsageRuntimeError)
            no_history = "does not require grad" in str(error) and not self.requires_grad
            if explained or not (no_history and self.is_cpu):
                raise
            raise UsageRuntimeError(
                "backward() cannot be called explicitly on what a compiled model returns: the "
                "device has run the backward pass and updated the weights already. Remove the "
                "call, and those of the optimizer. If the tensor is no result of a model of "
                f"popsim_torch, PyTorch says why it fails: {error}"
            ) from error

    torch.Tensor.backward = backward  # type: ignore[method-assign]
