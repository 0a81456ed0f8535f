"""Checks writes of slices: rules for their shapes accept what PyTorch's kernels refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from popsim_torch.trace.eager_errors import error_on_host
from popsim_torch.trace.graph.traced_tensors import host_computation, in_transform, is_traced

__all__ = ["check_slice"]

aten = torch.ops.aten
# The operator that takes the slice, and the names of the arguments; the first two are tensors.
_SELECT = aten.select.int, ("input", "src", "dim", "index")
_SLICE = aten.slice.Tensor, ("input", "src", "dim", "start", "end", "step")
_DIAGONAL = aten.diagonal.default, ("input", "src", "offset", "dim1", "dim2")
_SLICES: dict[Any, tuple[Callable[..., torch.Tensor], tuple[str, ...]]] = {
    torch.select_scatter: _SELECT,
    torch.Tensor.select_scatter: _SELECT,
    torch.slice_scatter: _SLICE,
    torch.Tensor.slice_scatter: _SLICE,
    torch.diagonal_scatter: _DIAGONAL,
    torch.Tensor.diagonal_scatter: _DIAGONAL,
}


def check_slice(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise the error of eager PyTorch if a function cannot write a slice.

    Args:
        func: A function of torch; most write no slice.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if func not in _SLICES or in_transform():
        return
    take, names = _SLICES[func]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, src = given.pop("input", None), given.pop("src", None)
    if not is_traced(x) or not isinstance(src, torch.Tensor) or _fits(take, x, src, given):
        return
    error = error_on_host(func, tuple(args), dict(kwargs))
    if error is not None:
        raise error


def _fits(
    take: Callable[..., torch.Tensor], x: torch.Tensor, src: torch.Tensor, given: Mapping[str, Any]
) -> bool:
    with host_computation():
        try:
            return take(torch.empty(x.shape, device="meta"), **given).shape == src.shape
        except (RuntimeError, IndexError, TypeError):
            return False
