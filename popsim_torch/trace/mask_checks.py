"""Checks the shapes of masks as indices: a mask becomes positions, which fit any longer tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from popsim_torch.trace.eager_errors import error_on_host
from popsim_torch.trace.graph.traced_tensors import in_transform, is_traced
from popsim_torch.trace.in_place import is_mask

__all__ = ["check_masks"]

_INDEXING = frozenset({"__getitem__", "__setitem__", "index_put", "index_put_"})


def check_masks(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise the error of eager PyTorch if a mask has another shape than the tensor it indexes.

    Args:
        func: A function of torch.
        name: Its name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        IndexError: It has: ``x[torch.tensor([True, False])]`` with three rows.
    """
    if name not in _INDEXING or len(args) < 2 or not is_traced(args[0]) or in_transform():
        return
    index = args[1]
    parts = index if isinstance(index, (tuple, list)) else (index,)
    masks = [part for part in parts if is_mask(part)]
    if not masks or (masks[0] is parts[0] and len(masks) == 1 and _fits(masks[0], args[0])):
        return
    error = error_on_host(func, args, kwargs)
    if isinstance(error, IndexError) and "shape of the mask" in str(error):
        raise error


def _fits(mask: torch.Tensor, tensor: torch.Tensor) -> bool:
    return mask.shape == tensor.shape[: mask.dim()]
