"""Calls callbacks of the user while a fit runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from popsim_torch.errors import UsageTypeError, UsageValueError, closest_names
from popsim_torch.observe.record import RecordSink

__all__ = ["Callbacks"]

_METHODS = ("on_fit_begin", "on_epoch_begin", "on_epoch_end", "on_batch_end")
_INSTEAD = {
    "on_train_begin": "on_fit_begin(model, optimizer)",
    "on_fit_start": "on_fit_begin(model, optimizer)",
    "on_train_start": "on_fit_begin(model, optimizer)",
    "on_train_batch_end": "on_batch_end(step, logs)",
    "on_train_epoch_start": "on_epoch_begin(epoch)",
    "on_train_epoch_end": "on_epoch_end(epoch, logs)",
    "on_validation_epoch_end": "on_epoch_end(epoch, logs), whose logs have 'val_loss'",
    "on_validation_end": "on_epoch_end(epoch, logs), whose logs have 'val_loss'",
    "on_test_end": "on_epoch_end(epoch, logs), whose logs have 'val_loss'",
    "on_train_end": "the lines after the call of fit",
    "on_fit_end": "the lines after the call of fit",
    "on_exception": "try and except around the call of fit",
}
"""Methods that other packages call, and what replaces them here."""
Logs = Mapping[str, torch.Tensor]


class Callbacks:
    """Calls some objects, each with as many arguments as its method takes.

    Args:
        function: The name of the caller, for messages.
        callbacks: One or several callbacks; each has at least one of ``on_epoch_begin(epoch)``,
            ``on_epoch_end(epoch, logs, anchors)``, ``on_batch_end(step, logs)`` and
            ``on_fit_begin(model, optimizer)``, or is a sink of records.

    Attributes:
        sinks: The callbacks that are sinks of records.

    Raises:
        UsageTypeError: A callback has none of these methods, or others that are never called.
    """

    def __init__(self, function: str, callbacks: Any) -> None:
        if not isinstance(callbacks, Iterable):
            callbacks = [callbacks]
        self._methods: dict[str, list[Callable[..., Any]]] = {name: [] for name in _METHODS}
        self._function = function
        self._monitored: list[tuple[str, str]] = []
        self.sinks: list[RecordSink] = []
        for callback in callbacks:
            found = [name for name in _METHODS if callable(getattr(callback, name, None))]
            if _is_sink(callback):
                self.sinks.append(callback)
            elif not found or isinstance(callback, type):
                raise UsageTypeError(_no_callback(function, callback))
            _refuse_others(function, callback)
            for name in found:
                self._methods[name].append(getattr(callback, name))
            if isinstance(getattr(callback, "monitor", None), str):
                self._monitored.append((type(callback).__name__, callback.monitor))

    def check_monitored(self, names: Sequence[str], *, validated: bool) -> None:
        """Refuse a callback that monitors a value which does not exist.

        Args:
            names: The names of the values of each step.
            validated: Whether there is data for validation.

        Raises:
            UsageValueError: A callback monitors such a value.
        """
        known = [*names, *(f"val_{name}" for name in names if validated)]
        for callback, monitor in self._monitored:
            if monitor not in known:
                without = monitor.startswith("val_") and not validated
                hint = " Values that begin with 'val_' need validation_data." if without else ""
                raise UsageValueError(
                    f"{self._function}: {callback} monitors '{monitor}', and an epoch has "
                    f"{', '.join(map(repr, known))}.{hint}"
                )

    @property
    def wants_batches(self) -> bool:
        """Whether any callback is called for single steps."""
        return bool(self._methods["on_batch_end"])

    def fit_begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Call the callbacks before the training."""
        self._call("on_fit_begin", model, optimizer)

    def epoch_begin(self, epoch: int) -> None:
        """Call the callbacks before an epoch."""
        self._call("on_epoch_begin", epoch, {})

    def epoch_end(self, epoch: int, logs: Logs, anchors: Logs) -> None:
        """Call the callbacks after an epoch; ``logs`` has a tensor of all steps for each value."""
        self._call("on_epoch_end", epoch, logs, anchors)

    def batch_end(self, step: int, logs: Logs) -> None:
        """Call the callbacks after a step; ``logs`` has a scalar for each value."""
        self._call("on_batch_end", step, logs)

    def _call(self, name: str, *arguments: Any) -> None:
        for method in self._methods[name]:
            method(*arguments[: _num_taken(method, len(arguments))])


def _is_sink(callback: object) -> bool:
    """Return whether an object takes records of statistics."""
    methods = ("write_records", "close")
    return not isinstance(callback, type) and all(hasattr(callback, one) for one in methods)


def _no_callback(function: str, callback: object) -> str:
    """Return the message for an object without any method to call."""
    said = f"{function}: a {type(callback).__name__} is not a callback. "
    if isinstance(callback, type):
        return f"{said}Pass an object, {callback.__name__}(...), not the class."
    if isinstance(callback, torch.optim.lr_scheduler.LRScheduler):
        return f"{said}Pass poptorch.LearningRateScheduler(scheduler)."
    return f"{said}It needs one of the methods {', '.join(_METHODS)}."


def _refuse_others(function: str, callback: object) -> None:
    """Refuse an object with methods of other packages' callbacks, which are never called."""
    others = [
        name
        for name in dir(type(callback))
        if name.startswith("on_")
        and name not in _METHODS
        and callable(getattr(callback, name, None))
    ]
    if not others:
        return
    told = [f"{name} ({_INSTEAD[name]})" if name in _INSTEAD else name for name in others]
    close = [] if others[0] in _INSTEAD else closest_names(others[0], _METHODS)
    hint = f" Closest name: {close[0]}." if close else ""
    raise UsageTypeError(
        f"{function}: a {type(callback).__name__} has methods that {function} does not call: "
        f"{', '.join(told)}.{hint} It calls {', '.join(_METHODS)}. Rename or remove the others; a "
        "callback needs no base class."
    )


def _num_taken(method: Callable[..., Any], most: int) -> int:
    """Return how many positional arguments a method takes, up to a limit."""
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
