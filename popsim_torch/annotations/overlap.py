"""Marks inputs and outputs whose transfer should overlap with computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from popsim_torch.enums import OverlapMode
from popsim_torch.errors import UsageAssertionError
from popsim_torch.ops import op_listener

__all__ = ["set_overlap_for_input", "set_overlap_for_output"]

T = TypeVar("T")


def set_overlap_for_input(tensors: T, mode: OverlapMode) -> T:
    """Mark inputs whose transfer should overlap with computation; no effect on values.

    A real machine hides the transfer on reserved tiles. Its requirements are checked when the model
    is compiled: each marked tensor is an input of forward, unchanged, and nothing else reads that
    input. Modes other than ``NoOverlap`` need a ``ShardedExecution`` strategy, tiles for input and
    output (``Options.TensorLocations.numIOTiles``) and the output mode ``All`` or ``Sum``.

    Args:
        tensors: A tensor, or tensors in nested tuples, lists and dicts; other values in these do
            not change.
        mode: Which loop hides the transfer.

    Returns:
        The same structure with the marked tensors, which forward has to use instead. Outside of a
        traced model, ``tensors`` unchanged.

    Raises:
        UsageAssertionError: ``mode`` is not an ``OverlapMode``.
        Error: When the model is compiled: one of the rules is broken.
    """
    return _mark("set_overlap_for_input", tensors, mode, for_input=True)


def set_overlap_for_output(tensors: T, mode: OverlapMode) -> T:
    """Mark outputs whose transfer should overlap with computation; no effect on values.

    The rules of :func:`set_overlap_for_input` apply, except for the marked tensors: each must be an
    output of the model that is returned once, and other operations may read it.

    Args:
        tensors: As for :func:`set_overlap_for_input`; forward has to return the result of this
            call.
        mode: As for :func:`set_overlap_for_input`.

    Returns: As for :func:`set_overlap_for_input`.

    Raises:
        UsageAssertionError: ``mode`` is not an ``OverlapMode``.
        Error: When the model is compiled: one of the rules is broken.
    """
    return _mark("set_overlap_for_output", tensors, mode, for_input=False)


def _mark(function: str, tensors: T, mode: OverlapMode, *, for_input: bool) -> T:
    if not isinstance(mode, OverlapMode):
        raise UsageAssertionError(f"{function}: mode {mode!r} must be a poptorch.OverlapMode.")
    listener = op_listener.get()
    if listener is None:
        return tensors
    marks = listener
    result: T = _map_tensors(
        lambda tensor: marks.overlap(tensor, mode, for_input=for_input), tensors
    )
    return result


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return a structure with a function applied to its tensors, and other values unchanged."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        items = {key: _map_tensors(function, item) for key, item in value.items()}
        return items if type(value) is dict else _same_kind(value, items)
    if isinstance(value, (list, tuple)):
        entries = [_map_tensors(function, item) for item in value]
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*entries)
        return type(value)(entries)
    return value


def _same_kind(value: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Return a copy of an object of a dict subclass, with other values."""
    twin = value.copy()
    twin.update(items)
    return twin
