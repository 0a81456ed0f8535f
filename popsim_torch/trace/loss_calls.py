"""Calls of the operators of losses whose gradients or dtypes are others in a trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from popsim_torch.trace.graph.traced_tensors import is_traced

__all__ = ["loss_call"]

_MEAN, _SUM = 1, 2  # how operators spell the reduction
_DIVIDE_BY_COUNT = frozenset({"mse_loss", "smooth_l1_loss", "huber_loss"})  # in their gradients
_IN_DTYPE_OF_INPUT = frozenset({"huber_loss", "soft_margin_loss"})


def loss_call(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return a replacement for the operator of a loss; None for other calls.

    Args:
        func: A function of torch.
        name: Its name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if name not in _DIVIDE_BY_COUNT | _IN_DTYPE_OF_INPUT or hasattr(func, "__code__"):
        return None  # (the Python functions of these names call the operators)
    if kwargs or len(args) < 3 or not all(map(is_traced, args[:2])):
        return None
    x, target, reduction, *others = args
    if name in _DIVIDE_BY_COUNT and reduction == _MEAN and x.numel() == 0:
        return functools.partial(_mean_of_nothing, func, x, target, *others)
    common = torch.promote_types(x.dtype, target.dtype)
    if name in _IN_DTYPE_OF_INPUT and x.is_floating_point() and common != x.dtype:
        call = functools.partial(func, x.to(common), target, reduction, *others)
        return lambda: call().to(x.dtype)
    return None


def _mean_of_nothing(
    func: Callable[..., Any], x: torch.Tensor, target: torch.Tensor, *others: Any
) -> torch.Tensor:
    """Compute a mean that is NaN; the gradients have no elements."""
    total: torch.Tensor = func(x, target, _SUM, *others)
    return total / 0
