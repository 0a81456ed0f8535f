"""Products of groups of rows with a matrix for each group: what mixtures of experts compute.

Only a run knows how many rows a group has, so each group multiplies all rows, and those of others
as zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from popsim_torch.trace.graph.device import DEVICE


def grouped_call(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], torch.Tensor] | None:
    """Return a function for a product of groups, or None for other calls, and for wrong ones.

    Args:
        name: The name of the called function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if name != "_grouped_mm":  # torch.nn.functional.grouped_mm calls it
        return None
    given = dict(zip(("mat_a", "mat_b", "offs", "bias", "out_dtype"), args, strict=False)) | kwargs
    first, second, ends = given["mat_a"], given["mat_b"], given.get("offs")
    is_whole = first.dim() == 3 and second.dim() == 3
    if given.get("bias") is not None or (ends is None) is not is_whole:
        return None  # PyTorch explains it
    return functools.partial(_product, first, second, ends, given.get("out_dtype"))


def _product(
    first: torch.Tensor,
    second: torch.Tensor,
    ends: torch.Tensor | None,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """Multiply groups.

    Args:
        first: ``(groups, rows, inner)``. If there are no groups in it, its rows are divided, or the
            inner axis if ``second`` has none either.
        second: ``(groups, inner, columns)``. If there are no groups in it, its columns are
            divided, or the inner axis.
        ends: The end of each group on the divided axis; None if nothing is divided.
        dtype: The dtype of the result; None for that of the operands.

    Returns:
        ``(rows, columns)`` if rows or columns are divided, else ``(groups, rows, columns)``. Rows
        and columns behind the last group are zeros.
    """
    if ends is None:
        result = torch.bmm(first, second)
    elif first.dim() == 2 and second.dim() == 3:
        parts = _divided(first.unsqueeze(0), ends, 1)
        result = parts.transpose(0, 1).flatten(1) @ second.flatten(0, 1)
    elif first.dim() == 3:
        parts = _divided(second.unsqueeze(0), ends, 2)
        result = first.transpose(0, 1).flatten(1) @ parts.flatten(0, 1)
    else:
        result = torch.matmul(_divided(first.unsqueeze(0), ends, 2), second)
    return result if dtype is None else result.to(dtype)


def _divided(tensor: torch.Tensor, ends: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the tensor for each group, with zeros in the places of other groups.

    Args:
        tensor: Shape ``(1, size, size)``.
        ends: The end of each group, shape ``(groups,)``.
        axis: The divided axis.
    """
    places = torch.arange(tensor.shape[axis], device=DEVICE)
    group_of_place = (places >= ends.unsqueeze(1)).sum(0)
    groups = torch.arange(ends.shape[0], device=DEVICE)
    mask = groups.unsqueeze(1) == group_of_place
    return torch.where(mask.unsqueeze(3 - axis), tensor, torch.zeros_like(tensor))
