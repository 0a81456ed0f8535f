"""Checks the labels of loss functions before PyTorch does.

PyTorch's messages mention the operators inside of a loss, not the labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from popsim_torch.errors import UsageRuntimeError
from popsim_torch.trace.graph.origin import user_line

__all__ = ["check_labels"]

_OF_CLASSES = frozenset({F.cross_entropy, F.nll_loss})
_OF_TWO_CLASSES = frozenset({F.binary_cross_entropy, F.binary_cross_entropy_with_logits})


def check_labels(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse labels that a loss function cannot take.

    Args:
        func: A function of ``torch.nn.functional``; most take any labels.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        UsageRuntimeError: Class labels are floats, or have a dimension too many, or binary labels
            are integers.
    """
    if func not in _OF_CLASSES and func not in _OF_TWO_CLASSES:
        return
    given = {**dict(zip(("input", "target"), args, strict=False)), **kwargs}
    scores, labels = given.get("input"), given.get("target")
    if not isinstance(scores, torch.Tensor) or not isinstance(labels, torch.Tensor):
        return
    is_float = labels.dtype.is_floating_point
    problem = ""
    if func in _OF_TWO_CLASSES:
        if not is_float:
            problem = "The labels of two classes have to be floats, 0 or 1: pass labels.float()."
    elif is_float:
        if func is F.nll_loss or labels.shape != scores.shape:
            problem = _float_labels(func, scores)
    elif labels.dim() == scores.dim() == 2:
        problem = _labels_of_two_dimensions(labels, scores)
    if problem:
        raise UsageRuntimeError(
            f"{func.__name__}{user_line(' at ')}: the labels have dtype {labels.dtype} and shape "
            f"{tuple(labels.shape)}, the scores have shape {tuple(scores.shape)}. {problem}"
        )


def _float_labels(func: Callable[..., Any], scores: torch.Tensor) -> str:
    advice = "Class labels have to be integers: pass labels.long()."
    if func is F.nll_loss:
        return advice
    return (
        f"{advice} Floats are class probabilities, and need the shape of "
        f"the scores, {tuple(scores.shape)}."
    )


def _labels_of_two_dimensions(labels: torch.Tensor, scores: torch.Tensor) -> str:
    needed = f"It needs one class for each sample, shape {tuple(scores.shape[:1])}: pass"
    if labels.shape == scores.shape:
        return f"{needed} labels.argmax(1), or the probabilities as floats: labels.float()."
    return f"{needed} labels.squeeze(1)." if labels.shape[1] == 1 else ""
