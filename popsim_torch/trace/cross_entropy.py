"""Cross entropy on class indices as two operators, so that the result of each can be anchored."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from popsim_torch.private_torch.operators import NLL_LOSS
from popsim_torch.trace.autocast import as_autocast

__all__ = ["cross_entropy_call"]


def cross_entropy_call(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return a replacement for a call of ``cross_entropy_loss``; None for other calls.

    Args:
        name: The name of a function of torch.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if name != "cross_entropy_loss":
        return None
    bound = as_autocast("cross_entropy_loss", _arguments(*args, **kwargs))
    target, smoothing = bound[1], bound[-1]
    if target.dtype.is_floating_point or smoothing != 0:
        return None
    return functools.partial(_cross_entropy, *bound[:-1])


def _arguments(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,  # the mean
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> tuple[Any, ...]:
    """Return all arguments of the operator; calls of ``torch.ops.aten`` leave some out."""
    return self, target, weight, reduction, ignore_index, label_smoothing


def _cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
) -> torch.Tensor:
    log_probabilities = torch.log_softmax(logits, 0 if logits.dim() == 1 else 1)
    result: torch.Tensor = NLL_LOSS(log_probabilities, target, weight, reduction, ignore_index)
    return result
