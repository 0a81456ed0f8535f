"""Marks of inputs and outputs whose transfer is to overlap with computation."""

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
    """Say that the transfer of inputs is to overlap with computation; no effect on values.

    A real machine hides the transfer on tiles of its own. What it needs is checked when the model
    is compiled: each marked tensor is an input as forward was given it, and nothing else reads that
    input; and for modes other than ``NoOverlap`` a ``ShardedExecution`` strategy, tiles for input
    and output (``Options.TensorLocations.numIOTiles``) and the output mode ``All`` or ``Sum``.

    Args:
        tensors: A tensor, or tensors in tuples, lists and dicts inside each other; anything else in
            there is left as it is.
        mode: Which loop hides the transfer.

    Returns:
        The same structure with the tensors to use from there on. Outside of a traced model,
        ``tensors`` as they are.

    Raises:
        UsageAssertionError: ``mode`` is no ``OverlapMode``.
        Error: When the model is compiled: one of the rules is broken.
    """
    return _mark("set_overlap_for_input", tensors, mode, for_input=True)


def set_overlap_for_output(tensors: T, mode: OverlapMode) -> T:
    """Say that the transfer of outputs is to overlap with computation; no effect on values.

    The rules are those of :func:`set_overlap_for_input`, but that each marked tensor is an output
    of the model, returned once. Other operations may read it.

    Args:
        tensors: As there; what is returned here is what forward has to return.
        mode: As there.

    Returns:
        As there.

    Raises:
        UsageAssertionError: ``mode`` is no ``OverlapMode``.
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
    """Return a structure with a function applied to its tensors, and the rest as it is."""
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
    """Return a copy of a dict of a class of its own with other values."""
    twin = value.copy()
    twin.update(items)
    return twin
