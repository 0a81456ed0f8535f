"""Attention that is causal and has a mask: eager PyTorch applies both, a trace refuses it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from popsim_torch.trace.eager_errors import error_on_host
from popsim_torch.trace.graph.device import DEVICE
from popsim_torch.trace.graph.traced_tensors import in_transform

__all__ = ["masked_causal_call"]

_NAME = "scaled_dot_product_attention"


def masked_causal_call(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return a replacement for attention with one mask for both; None for other calls.

    Args:
        func: A function of torch.
        name: Its name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if name != _NAME or in_transform():
        return None
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    mask = given.get("attn_mask")
    if mask is None or not given.get("is_causal") or mask.requires_grad:
        return None
    if error_on_host(func, args, kwargs) is not None:  # the trace finds the mistake, too
        return None
    return functools.partial(_masked_causal, func, **given)


def _masked_causal(
    func: Callable[..., Any], attn_mask: torch.Tensor, is_causal: bool, **given: Any
) -> torch.Tensor:
    sizes = given["query"].shape[-2], given["key"].shape[-2]
    past = torch.ones(sizes, dtype=torch.bool, device=DEVICE).tril()
    if attn_mask.dtype == torch.bool:
        mask = attn_mask & past
    else:
        mask = attn_mask.masked_fill(~past, -math.inf)
    result: torch.Tensor = func(**given, attn_mask=mask)
    return result
