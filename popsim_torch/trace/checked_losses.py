"""Losses that PyTorch computes after it has read values, or whose shape rules are wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from popsim_torch.trace.graph.traced_tensors import is_batched

__all__ = ["TRACEABLE"]

_REDUCTIONS = ("none", "mean", "sum")
_NEGATIVE_VARIANCE = (
    "gaussian_nll_loss: var has negative entry/entries. Variances are not negative: pass x.exp() "
    "or nn.functional.softplus(x) of what the layer returns."
)


def _gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """Compute ``F.gaussian_nll_loss``; a run fails if ``var`` has negative numbers."""
    variance = _variance(input, var)
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{reduction} is not valid")
    # The gradient ignores the lower bound.
    variance = variance + (variance.detach().clamp(min=eps) - variance.detach())
    loss = 0.5 * (torch.log(variance) + (input - target) ** 2 / variance)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


def _variance(input: torch.Tensor, var: torch.Tensor | float) -> torch.Tensor:
    """Return the variance as a tensor that can be broadcast to the input."""
    if not isinstance(var, torch.Tensor):
        if var < 0:
            raise ValueError("var has negative entry/entries")
        return torch.full_like(input, var)
    if not is_batched(var):
        negative = (var.detach() < 0).any()
        torch.ops.aten._assert_async.msg(negative.logical_not(), _NEGATIVE_VARIANCE)
    if var.shape == input.shape:
        return var
    if var.shape == input.shape[:-1]:
        return var.unsqueeze(-1)
    # As in PyTorch, the one other size is 1: its sum with others cannot be.
    sizes = zip(input.shape, var.shape, strict=True) if input.dim() == var.dim() else ()
    if sum(other for one, other in sizes if one != other) != 1:
        raise ValueError("var is of incorrect size")
    return var


def _multilabel_margin_loss(
    input: torch.Tensor, target: torch.Tensor, *reductions: Any, **named: Any
) -> torch.Tensor:
    """Compute ``F.multilabel_margin_loss``; PyTorch's shape rule for one sample adds an axis."""
    if input.dim() > 1:
        return F.multilabel_margin_loss(input, target, *reductions, **named)
    samples = input.reshape(1, -1), target.reshape(1, -1)
    return F.multilabel_margin_loss(*samples, *reductions, **named).reshape(())


TRACEABLE: Mapping[Callable[..., Any], Callable[..., torch.Tensor]] = {
    F.gaussian_nll_loss: _gaussian_nll_loss,
    F.multilabel_margin_loss: _multilabel_margin_loss,
}
"""Replacements in a trace for functions that read values, or whose shape rules are wrong."""
