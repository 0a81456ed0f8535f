"""Losses that PyTorch computes after it has read values; here the device checks the values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from popsim_torch.trace.graph.traced_tensors import find_node, is_batched

__all__ = ["TRACEABLE"]

_PROBABILITIES = frozenset({torch.ops.aten.sigmoid.default, torch.ops.aten._softmax.default})
_REDUCTIONS = ("none", "mean", "sum")


def _binary_cross_entropy(
    input: torch.Tensor, target: torch.Tensor, *others: Any, **named: Any
) -> torch.Tensor:
    """Compute ``F.binary_cross_entropy``; a run fails if eager PyTorch does.

    Results of a sigmoid are not checked: they are probabilities or NaN, which stays NaN.
    """
    loss = F.binary_cross_entropy(input, target, *others, **named)
    if getattr(find_node(input), "target", None) not in _PROBABILITIES:
        _check_probabilities(
            "input", input, "Apply a sigmoid, or use binary_cross_entropy_with_logits."
        )
    _check_probabilities("target", target, "It has the probability of each label, 0 or 1.")
    return loss


def _check_probabilities(name: str, values: torch.Tensor, advice: str) -> None:
    if values.numel() == 0 or is_batched(values):
        return
    values = values.detach()
    # (a comparison with NaN is false)
    valid = (values.amin() >= 0) & (values.amax() <= 1)
    problem = f"binary_cross_entropy: all elements of {name} should be between 0 and 1"
    torch.ops.aten._assert_async.msg(valid, f"{problem}. {advice}")


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
        problem = "gaussian_nll_loss: var has negative entry/entries"
        torch.ops.aten._assert_async.msg(negative.logical_not(), problem)
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
    F.binary_cross_entropy: _binary_cross_entropy,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    F.multilabel_margin_loss: _multilabel_margin_loss,
}
"""Replacements in a trace for functions that read values, or whose shape rules are wrong."""
