"""Rows of a tensor at a position that only a run knows: ``history[step % 3]``."""

from __future__ import annotations

from typing import Any

import torch

from popsim_torch.optimizer_steps.numbers import StepNumber

__all__ = ["is_position", "row", "set_row"]

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def is_position(index: Any) -> bool:
    """Return whether an index begins with a number of the device."""
    first = index[0] if isinstance(index, tuple) and index else index
    if isinstance(first, torch.Tensor):
        return not first.dim() and first.dtype in _INTEGERS
    return isinstance(first, StepNumber)


def _parts(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Return the position in the first dimension, and the rest of an index."""
    first, *rest = index if isinstance(index, tuple) else (index,)
    place = first.tensor if isinstance(first, StepNumber) else first
    place = place.to(torch.int64)
    return torch.where(place < 0, place + tensor.shape[0], place), tuple(rest)


def row(tensor: torch.Tensor, index: Any) -> Any:
    """Return a copy of a row, or of a part of it."""
    place, rest = _parts(tensor, index)
    found = torch.index_select(tensor, 0, place.reshape(1)).squeeze(0)
    return found[rest] if rest else found


def set_row(tensor: torch.Tensor, index: Any, value: Any) -> None:
    """Write a row, or a part of it."""
    place, rest = _parts(tensor, index)
    new = value
    if rest:
        new = row(tensor, index[0]).clone()
        new[rest] = value
    places = torch.arange(tensor.shape[0]).reshape(-1, *[1] * (tensor.dim() - 1))
    if isinstance(new, StepNumber):
        new = new.tensor.to(tensor.dtype)
    elif isinstance(new, torch.Tensor):
        new = new.to(tensor.dtype)
    tensor.copy_(torch.where(places == place, new, tensor))
