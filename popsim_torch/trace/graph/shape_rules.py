"""Shapes of a few operators for which PyTorch computes them from many smaller operators.

Each rule covers the usual case, and returns None for others, which are PyTorch's. The results are
those of PyTorch's rules (``tests/unit/trace/test_shape_rules.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["RULES", "Layout"]

Layout = tuple[Sequence[int], Sequence[int], torch.dtype]
"""Shape, strides and dtype of a new tensor."""

aten = torch.ops.aten


def _is_usual(*tensors: Any) -> bool:
    return all(
        isinstance(one, torch.Tensor) and one.dtype is torch.float32 and one.is_contiguous()
        for one in tensors
    )


def _normalised(num_of_channels: int) -> Callable[..., list[Layout] | None]:
    """Return the rule of a batch norm that returns some tensors with a number per channel."""

    def rule(
        x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *_: Any
    ) -> list[Layout] | None:
        if not training or not _is_usual(x, weight, bias, mean, variance) or x.dim() < 2:
            return None
        channels = ((x.shape[1],), (1,), x.dtype)
        return [(x.shape, x.stride(), x.dtype), *[channels] * num_of_channels]

    return rule


def _backward(
    gradient: Any,
    x: Any,
    weight: Any,
    _mean: Any,
    _variance: Any,
    mean: Any,
    deviation: Any,
    training: bool,
    _eps: float,
    wanted: Sequence[bool],
) -> list[Layout] | None:
    if not training or not all(wanted) or not _is_usual(gradient, x, weight, mean, deviation):
        return None
    if x.dim() < 2:
        return None
    channels = ((x.shape[1],), (1,), x.dtype)
    return [(x.shape, x.stride(), x.dtype), channels, channels]


RULES: dict[Any, Callable[..., list[Layout] | None]] = {
    aten._native_batch_norm_legit.default: _normalised(2),
    aten._native_batch_norm_legit_functional.default: _normalised(4),
    aten.native_batch_norm_backward.default: _backward,
}
"""Rules by operator: functions of the positional arguments."""
