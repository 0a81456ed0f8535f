"""Explains why ``backward()`` fails for a tensor that a compiled model returned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from popsim_torch.errors import UsageRuntimeError

__all__ = ["explain_backward"]


@functools.cache
def explain_backward() -> None:
    """Add an explanation to the error of ``Tensor.backward`` without gradient; call this once.

    A model returns plain tensors without a history, and PyTorch says that they do not require a
    gradient. Such tensors look like all other tensors without history, and a mark on them would
    slow down every call. So the explanation is added to the error for all of them, behind PyTorch's
    reason. The error is still a ``RuntimeError``, and also an ``Error``.
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
                f"{error}. If the tensor comes from a compiled model of popsim_torch: backward() "
                "cannot be called explicitly on what it returns, because the device has run the "
                "backward pass and updated the weights already. Remove the call, and those of the "
                "optimizer."
            ) from error

    torch.Tensor.backward = backward  # type: ignore[method-assign]
