"""Objects that are told how a fit goes on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from popsim_torch.errors import UsageTypeError

__all__ = ["Callbacks"]

_METHODS = ("on_epoch_begin", "on_epoch_end", "on_batch_end")
Logs = Mapping[str, torch.Tensor]


class Callbacks:
    """Calls some objects, each with as many of the arguments as its method takes.

    Args:
        function: Which, for messages.
        callbacks: One or several; each has at least one of ``on_epoch_begin(epoch)``,
            ``on_epoch_end(epoch, logs, anchors)`` and ``on_batch_end(step, logs)``.

    Raises:
        UsageTypeError: One has none of these.
    """

    def __init__(self, function: str, callbacks: Any) -> None:
        if not isinstance(callbacks, Iterable):
            callbacks = [callbacks]
        self._methods: dict[str, list[Callable[..., Any]]] = {name: [] for name in _METHODS}
        for callback in callbacks:
            found = [name for name in _METHODS if callable(getattr(callback, name, None))]
            if not found or isinstance(callback, type):
                raise UsageTypeError(
                    f"{function}: a {type(callback).__name__} is no callback. It needs one of the "
                    f"methods {', '.join(_METHODS)}."
                )
            for name in found:
                self._methods[name].append(getattr(callback, name))

    @property
    def wants_batches(self) -> bool:
        """Whether any is told of single steps."""
        return bool(self._methods["on_batch_end"])

    def epoch_begin(self, epoch: int) -> None:
        """An epoch begins."""
        self._call("on_epoch_begin", epoch, {})

    def epoch_end(self, epoch: int, logs: Logs, anchors: Logs) -> None:
        """An epoch has ended; ``logs`` has a tensor of all its steps for each value."""
        self._call("on_epoch_end", epoch, logs, anchors)

    def batch_end(self, step: int, logs: Logs) -> None:
        """A step has ended; ``logs`` has a scalar for each value."""
        self._call("on_batch_end", step, logs)

    def _call(self, name: str, *arguments: Any) -> None:
        for method in self._methods[name]:
            method(*arguments[: _num_taken(method, len(arguments))])


def _num_taken(method: Callable[..., Any], most: int) -> int:
    """Return how many positional arguments a method takes, at most so many."""
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return most
    for count in range(most, 1, -1):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count
    return 1
