"""Running statistics of norms in checkpoints: eager PyTorch updates them again in backward.

A checkpoint runs its function once more in the backward pass, so the statistics get the same batch
twice; with ``use_reentrant=True`` in another checkpoint three times. Here the function is traced
once. What it does to running statistics is repeated after forward: the last checkpoint first, as in
backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

from popsim_torch.ops import op_listener
from popsim_torch.private_torch.modes import DisableTorchFunction
from popsim_torch.trace.graph.origin import current_origin, origin_kept, set_origin
from popsim_torch.trace.graph.traced_tensors import is_traced

__all__ = ["is_in_checkpoint", "note_kept", "note_update", "repeated_norms", "repeated_updates"]

_Update = Callable[[], None]


class _Checkpoints(threading.local):
    """The checkpoints of the trace in this thread.

    Attributes:
        updates: The updates in each open checkpoint, the outer one first.
        ended: Those of the checkpoints that have ended, in order.
        in_norm: Whether a norm is being called: PyTorch calls its function twice under a mode.
        is_kept: Whether the results of the norm are kept, so that it does not run again.
    """

    def __init__(self) -> None:
        self.updates: list[tuple[list[_Update], bool]] = []
        self.ended: list[list[_Update]] = []
        self.in_norm = False
        self.is_kept = False


_checkpoints = _Checkpoints()


@contextmanager
def repeated_updates(*, reentrant: bool) -> Iterator[None]:
    """Repeat the updates in this scope at the end of forward: backward would run them again.

    Args:
        reentrant: Whether the function also runs again for a checkpoint around this one.
    """
    updates: list[_Update] = []
    _checkpoints.updates.append((updates, reentrant))
    try:
        yield
        _checkpoints.ended.append(updates)
    finally:
        _checkpoints.updates.pop()


def is_in_checkpoint() -> bool:
    """Return whether a checkpoint of a traced model is open."""
    listener: Any = op_listener.get()
    return bool(_checkpoints.updates) and listener is not None and not listener.is_inside_of_body


def note_kept() -> None:
    """Record that a policy keeps the results of an operator."""
    _checkpoints.is_kept = True


def note_update(update: _Update) -> None:
    """Record a change of running statistics in an open checkpoint.

    Args:
        update: Makes the same change once more.
    """
    origin = current_origin()

    def there() -> None:
        with origin_kept(), torch.no_grad(), DisableTorchFunction():
            set_origin(origin)
            update()

    *outer, (innermost, _) = _checkpoints.updates
    for updates in (*(updates for updates, reentrant in outer if reentrant), innermost):
        updates.append(there)


@contextmanager
def repeated_norms() -> Iterator[None]:
    """Note the updates of running statistics in this scope, and repeat them at its end."""
    _checkpoints.ended = []
    try:
        with mock.patch.multiple(
            F, batch_norm=_noting(F.batch_norm), instance_norm=_noting(F.instance_norm)
        ):
            yield
        for updates in reversed(_checkpoints.ended):
            for update in updates:
                update()
    finally:
        _checkpoints.ended = []


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a norm that notes how it changes its running statistics."""
    flag = "training" if function.__name__ == "batch_norm" else "use_input_stats"
    names = ("input", "running_mean", "running_var", "weight", "bias", flag, "momentum", "eps")
    defaults: dict[str, Any] = {flag: flag == "use_input_stats", "momentum": 0.1}

    def norm_with_statistics(*args: Any, **kwargs: Any) -> Any:
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        running: list[Any] = [given.get("running_mean"), given.get("running_var")]
        known = is_in_checkpoint() and all(map(_is_traced, running))
        if not known or not given[flag] or _checkpoints.in_norm:
            return function(*args, **kwargs)
        keep = 1.0 - given["momentum"]
        with torch.no_grad(), DisableTorchFunction():
            before = [statistic.clone() for statistic in running]
        _checkpoints.in_norm, _checkpoints.is_kept = True, False
        try:
            result = function(*args, **kwargs)
        finally:
            _checkpoints.in_norm = False
        if _checkpoints.is_kept:
            return result
        with torch.no_grad(), DisableTorchFunction():
            # what the batch has added
            pairs = zip(running, before, strict=True)
            added = [statistic - keep * old for statistic, old in pairs]

        def again() -> None:
            for statistic, new in zip(running, added, strict=True):
                # (not a change for autograd, as little as that of the norm itself)
                statistic.data.mul_(keep).add_(new)

        note_update(again)
        return result

    return norm_with_statistics


def _is_traced(value: object) -> bool:
    return isinstance(value, torch.Tensor) and is_traced(value)
