"""Settings of PopTorch's back end that replace a function by another computation.

Each setting has a table with torch functions and their replacements in a trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

Replacements = Mapping[Callable[..., Any], Callable[..., Any]]


def strided_group_norm(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    """Normalise groups of channels that are ``num_groups`` apart, not adjacent.

    Args:
        x: A tensor of shape ``[batch, channels, ...]``.
        num_groups: Number of groups, a divisor of the channels; channel c is in group
            ``c % num_groups``.
        weight: A tensor of shape ``[channels]``.
        bias: A tensor of shape ``[channels]``.
        eps: The number that is added to the variances.
        cudnn_enabled: Ignored.
    """
    batch, channels, *rest = x.shape
    if channels % num_groups:
        raise RuntimeError(
            "Expected number of channels in input to be divisible by num_groups, but got input of "
            f"shape {list(x.shape)} and num_groups={num_groups}"
        )
    size = channels // num_groups
    together = x.reshape(batch, size, num_groups, *rest).transpose(1, 2).reshape(x.shape)
    out, _, _ = torch.native_group_norm(
        together, None, None, batch, channels, math.prod(rest), num_groups, eps
    )
    out = out.reshape(batch, num_groups, size, *rest).transpose(1, 2).reshape(x.shape)
    by_channel = (channels, *(1 for _ in rest))
    if weight is not None:
        out = out * weight.reshape(by_channel)
    return out if bias is None else out + bias.reshape(by_channel)


def unstable_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Compute a softmax without subtracting the maximum first: large values overflow.

    Args:
        x: A tensor of any shape.
        dim: The dimension along which the sums are 1.
        dtype: The dtype to convert to first.
    """
    powers = torch.exp(x if dtype is None else x.to(dtype))
    return powers / powers.sum(dim, keepdim=True)


_BY_SETTING: dict[str, Replacements] = {
    "groupNormStridedChannelGrouping": {torch.group_norm: strided_group_norm},
    "enableNonStableSoftmax": dict.fromkeys(
        (torch.softmax, torch.Tensor.softmax, torch.special.softmax), unstable_softmax
    ),
}


def replacements(settings: Iterable[str]) -> Replacements:
    """Return the functions to trace instead of torch functions.

    Args:
        settings: The names of the settings that are on; settings without a table are ignored.
    """
    return {
        function: replacement
        for setting in settings
        for function, replacement in _BY_SETTING.get(setting, {}).items()
    }
