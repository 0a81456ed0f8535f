"""Objects that are told how a fit goes on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from popsim_torch.errors import UsageTypeError, UsageValueError, closest_names

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
"""Methods that other packages call, and what does their work here."""
Logs = Mapping[str, torch.Tensor]


class Callbacks:
    """Calls some objects, each with as many of the arguments as its method takes.

    Args:
        function: Which, for messages.
        callbacks: One or several; each has at least one of ``on_epoch_begin(epoch)``,
            ``on_epoch_end(epoch, logs, anchors)``, ``on_batch_end(step, logs)`` and
            ``on_fit_begin(model, optimizer)``.

    Raises:
        UsageTypeError: One has none of these, or others that nobody would call.
    """

    def __init__(self, function: str, callbacks: Any) -> None:
        if not isinstance(callbacks, Iterable):
            callbacks = [callbacks]
        self._methods: dict[str, list[Callable[..., Any]]] = {name: [] for name in _METHODS}
        self._function = function
        self._monitored: list[tuple[str, str]] = []
        for callback in callbacks:
            found = [name for name in _METHODS if callable(getattr(callback, name, None))]
            if not found or isinstance(callback, type):
                raise UsageTypeError(_no_callback(function, callback))
            _refuse_others(function, callback)
            for name in found:
                self._methods[name].append(getattr(callback, name))
            if isinstance(getattr(callback, "monitor", None), str):
                self._monitored.append((type(callback).__name__, callback.monitor))

    def check_monitored(self, names: Sequence[str], *, validated: bool) -> None:
        """Refuse a callback that waits for a value which there is not.

        Args:
            names: Of the values of each step.
            validated: Whether there is data for validation.

        Raises:
            UsageValueError: There is one.
        """
        known = [*names, *(f"val_{name}" for name in names if validated)]
        for callback, monitor in self._monitored:
            if monitor not in known:
                without = monitor.startswith("val_") and not validated
                hint = " Values with 'val_' in front need validation_data." if without else ""
                raise UsageValueError(
                    f"{self._function}: {callback} monitors '{monitor}', and an epoch has "
                    f"{', '.join(map(repr, known))}.{hint}"
                )

    @property
    def wants_batches(self) -> bool:
        """Whether any is told of single steps."""
        return bool(self._methods["on_batch_end"])

    def fit_begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """The training begins."""
        self._call("on_fit_begin", model, optimizer)

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


def _no_callback(function: str, callback: object) -> str:
    """Return what to say of an object that has nothing to call."""
    said = f"{function}: a {type(callback).__name__} is no callback. "
    if isinstance(callback, type):
        return f"{said}Pass an object, {callback.__name__}(...), not the class."
    if isinstance(callback, torch.optim.lr_scheduler.LRScheduler):
        return f"{said}Pass poptorch.LearningRateScheduler(scheduler)."
    return f"{said}It needs one of the methods {', '.join(_METHODS)}."


def _refuse_others(function: str, callback: object) -> None:
    """Refuse an object that has methods of other packages' callbacks: nobody would call them."""
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
