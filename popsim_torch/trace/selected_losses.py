"""Sums, means and losses of elements at a mask: the other rows do not count."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from popsim_torch.private_torch.trees import tree_map_only
from popsim_torch.trace.selected import Selected, is_usual

__all__ = ["LOSSES", "loss_of", "mean_of", "sum_of"]

_OF_CLASSES = frozenset({"cross_entropy", "nll_loss"})
_WITH_WEIGHTS_OF_CLASSES = _OF_CLASSES | {"multi_margin_loss", "multilabel_soft_margin_loss"}
_ELEMENTWISE = frozenset(
    {
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "hinge_embedding_loss",
        "huber_loss",
        "kl_div",
        "l1_loss",
        "mse_loss",
        "poisson_nll_loss",
        "smooth_l1_loss",
        "soft_margin_loss",
    }
)
# Their mean is that of the elements with weights, divided by the sum of the weights.
_WITH_WEIGHTED_MEAN = frozenset({"l1_loss", "mse_loss"})
_OF_ROWS = frozenset(
    {
        "cosine_embedding_loss",
        "gaussian_nll_loss",
        "margin_ranking_loss",
        "multilabel_margin_loss",
        "triplet_margin_loss",
    }
)
LOSSES = _WITH_WEIGHTS_OF_CLASSES | _ELEMENTWISE | _OF_ROWS
"""The losses whose elements come from one row each."""


def sum_of(of: Selected) -> torch.Tensor:
    """Return the sum of all elements."""
    return torch.where(of.over(of.full), of.full, torch.zeros_like(of.full)).sum()


def mean_of(of: Selected) -> torch.Tensor:
    """Return the mean of all elements."""
    if not (of.full.is_floating_point() or of.full.is_complex()):
        raise RuntimeError(
            "mean(): could not infer output dtype. Input dtype must be either a floating point or "
            f"complex dtype. Got: {str(of.dtype).removeprefix('torch.')}"
        )
    in_row = of.full.numel() // of.rows.numel()
    return (sum_of(of) / (of.rows.sum() * in_row)).to(of.dtype)


def loss_of(
    first: Selected,
    func: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Compute a loss.

    Raises:
        Error: Its arguments are at different masks.
    """
    bound = inspect.signature(getattr(F, name)).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    legacy = any(given.get(key) is not None for key in ("size_average", "reduce"))
    reduction = given["reduction"]
    known = ("none", "mean", "sum", "batchmean") if name == "kl_div" else ("none", "mean", "sum")
    if legacy or reduction not in known:
        raise first.refused(name)
    if name in _WITH_WEIGHTED_MEAN | {"huber_loss"} and is_usual(given.get("weight")):
        raise first.refused(f"{name}, with weights that are no such elements,")
    for key, one in given.items():
        if type(one) is Selected and not first.is_with(one):
            raise first.refused(f"{name}, with elements at another mask,")
        if not is_usual(one):
            continue
        of_classes = key == "weight" and name in _WITH_WEIGHTS_OF_CLASSES
        most = first.dim() - 1 if name in _ELEMENTWISE else 0
        if not of_classes and one.dim() > most:
            raise first.refused(f"{name}, with a tensor of shape {list(one.shape)},")
    if name in _OF_CLASSES and reduction != "none" and not given["target"].dtype.is_floating_point:
        return _loss_of_classes(func, given)
    given["reduction"] = "none"
    full = func(**tree_map_only(Selected, lambda one: one.full, dict(given)))
    losses = first.like(first.finite(full))
    if reduction == "none":
        return losses
    if reduction == "batchmean":
        return sum_of(losses) / first.rows.sum()
    if reduction == "mean" and name in _WITH_WEIGHTED_MEAN and given.get("weight") is not None:
        return sum_of(losses) / sum_of(given["weight"])
    return sum_of(losses) if reduction == "sum" else mean_of(losses)


def _loss_of_classes(func: Callable[..., Any], given: dict[str, Any]) -> torch.Tensor:
    """Compute a loss of classes: the class of the other rows is the one to ignore."""
    target = given["target"]
    ignored = torch.full_like(target.full, given["ignore_index"])
    full: dict[str, Any] = tree_map_only(Selected, lambda one: one.full, dict(given))
    full["target"] = torch.where(target.over(target.full), target.full, ignored)
    result: torch.Tensor = func(**full)
    return result
