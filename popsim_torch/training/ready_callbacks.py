"""Ready-to-use callbacks for a fit."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from popsim_torch.errors import Error, UsageTypeError, UsageValueError
from popsim_torch.files.whole_file import write_whole

__all__ = ["Checkpoint", "EarlyStopping", "LearningRateScheduler"]

Logs = Mapping[str, torch.Tensor]


class _Best:
    """The best value so far of a monitored quantity."""

    def __init__(self, caller: str, monitor: str, mode: str, min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise UsageValueError(
                f"{caller}: mode must be 'min' or 'max', got {mode!r}. 'min' is for a loss, 'max' "
                "for an accuracy."
            )
        self._monitor, self._sign = monitor, 1.0 if mode == "min" else -1.0
        self._min_delta = min_delta
        self._best = math.inf

    def improves(self, logs: Logs) -> bool:
        """Record an epoch; return whether it is better than all epochs before."""
        value = self._sign * _mean(logs[self._monitor])
        if not value < self._best - self._min_delta:
            return False
        self._best = value
        return True


def _mean(values: torch.Tensor) -> float:
    return values.double().mean().item()


class EarlyStopping:
    """Ends a fit when a value has not improved for some epochs.

    Args:
        monitor: The value: ``loss``, a metric, or one of these with the prefix ``val_``.
        patience: The number of epochs in a row that may be without an improvement; one more ends
            the training.
        min_delta: The smallest change that counts as an improvement.
        mode: ``min`` or ``max``: whether smaller or larger values are better.

    Raises:
        UsageValueError: An argument is out of range.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        patience: int = 0,
        min_delta: float = 0.0,
        mode: str = "min",
    ) -> None:
        if type(patience) is not int or patience < 0:
            raise UsageValueError(
                f"EarlyStopping: patience must be an integer of 0 or more, got {patience!r}."
            )
        if not min_delta >= 0:
            raise UsageValueError(f"EarlyStopping: min_delta must be 0 or more, got {min_delta!r}.")
        self.monitor = monitor
        self._patience, self._mode, self._min_delta = patience, mode, min_delta
        self._best, self._waited = self._new_best(), 0

    def on_fit_begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Start again, because the object may be used for several fits."""
        self._best, self._waited = self._new_best(), 0

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """End the training if there was no improvement for too long."""
        self._waited = 0 if self._best.improves(logs) else self._waited + 1
        if self._waited > self._patience:
            raise StopIteration

    def _new_best(self) -> _Best:
        return _Best("EarlyStopping", self.monitor, self._mode, self._min_delta)


class Checkpoint:
    """Writes weights and optimizer state to a file at the end of each epoch.

    ``torch.load(path, weights_only=True)`` reads it: a dictionary of ``epoch``, counted from 0,
    ``means`` of loss and metrics, and the state dictionaries ``model`` and ``optimizer``. It holds
    no code. A file is written completely or not at all: an existing file stays until the new one is
    complete.

    Args:
        path: The path of the file; with ``{epoch}`` in it each epoch has its own file. The folder
            is created if needed.
        monitor: Write only epochs in which this value is the best so far; None for all epochs.
        mode: ``min`` or ``max``: whether smaller or larger values are better.

    Raises:
        UsageValueError: The mode is something else, or the path has other names in braces.
    """

    def __init__(
        self, path: str | os.PathLike[str], monitor: str | None = None, mode: str = "min"
    ) -> None:
        self.monitor = monitor
        self._path, self._mode = os.fspath(path), mode
        try:
            self._path.format(epoch=0)
        except (KeyError, IndexError, ValueError) as error:
            raise UsageValueError(
                f"Checkpoint: the path {self._path!r} has something else than {{epoch}} in braces. "
                "Write {epoch}, or {epoch:03} for three digits."
            ) from error
        self._best = self._new_best()
        self._trained: tuple[nn.Module, torch.optim.Optimizer] | None = None

    def on_fit_begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Store the model and the optimizer that are trained."""
        self._trained, self._best = (model, optimizer), self._new_best()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Write the file.

        Raises:
            Error: The file cannot be written.
        """
        if self._trained is None or (self._best is not None and not self._best.improves(logs)):
            return
        model, optimizer = self._trained
        content = {
            "epoch": epoch,
            "means": {name: _mean(values) for name, values in logs.items()},
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        path = Path(self._path.format(epoch=epoch))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Error(
                f"Checkpoint: the folder of '{path}' cannot be created: {error}."
            ) from error
        write_whole(path, "checkpoint", partial(torch.save, content))

    def _new_best(self) -> _Best | None:
        return None if self.monitor is None else _Best("Checkpoint", self.monitor, self._mode)


class LearningRateScheduler:
    """Calls ``step()`` of a scheduler at the end of each epoch.

    Args:
        scheduler: From ``torch.optim.lr_scheduler``, made for the optimizer of the fit.
        monitor: The value to pass to ``ReduceLROnPlateau``, such as ``val_loss``, which is the
            default for it.

    Raises:
        UsageTypeError: The argument is not a scheduler.
    """

    def __init__(
        self, scheduler: torch.optim.lr_scheduler.LRScheduler, monitor: str | None = None
    ) -> None:
        if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            raise UsageTypeError(
                f"LearningRateScheduler: needs a scheduler, got a {type(scheduler).__name__}. To "
                "use a function that returns a factor, pass "
                "torch.optim.lr_scheduler.LambdaLR(optimizer, function)."
            )
        plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        if monitor is not None and not plateau:
            raise UsageTypeError(
                f"LearningRateScheduler: a {type(scheduler).__name__} monitors no value. Leave "
                "monitor out."
            )
        self.monitor = (monitor or "val_loss") if plateau else None
        self._scheduler: Any = scheduler

    def on_fit_begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a scheduler of another optimizer.

        Raises:
            UsageValueError: The scheduler belongs to another optimizer.
        """
        if self._scheduler.optimizer.param_groups is not optimizer.param_groups:
            raise UsageValueError(
                "LearningRateScheduler: the scheduler was made for another optimizer than the one "
                "of this fit. Pass the same one to both."
            )

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Call ``step()`` of the scheduler."""
        if self.monitor is None:
            self._scheduler.step()
        else:
            self._scheduler.step(_mean(logs[self.monitor]))
