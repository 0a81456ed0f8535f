"""Computes the loss and the metrics of a batch."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from popsim_torch.errors import UsageTypeError, UsageValueError

__all__ = ["LOSS", "Metrics", "ModelCall", "inputs_of", "mode", "named_metrics"]

LOSS = "loss"
Metric = Callable[[Any, Any], torch.Tensor]
Metrics = Mapping[str, Metric] | Sequence[Metric | str] | Metric | str


@dataclass(frozen=True)
class ModelCall:
    """Calls a model with a batch.

    Attributes:
        function: The name of the caller, for messages.
        model: The user's module.
        loss: Called with the output and the target; None for a model that returns its loss.
        metrics: Functions by name; called with the output and the target.
    """

    function: str
    model: nn.Module
    loss: Callable[[Any, Any], torch.Tensor] | None
    metrics: Mapping[str, Metric]

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the loss and the metrics of a batch, scalars by name, the loss first.

        Raises:
            UsageTypeError: The batch, or the result of the model, has a wrong structure.
        """
        if self.loss is None:
            result = self.model(*args, **kwargs)
            loss, output = self._loss_among(result)
            target = [*args, *kwargs.values()][-1]
        else:
            if kwargs or len(args) < 2:
                raise UsageTypeError(
                    f"{self.function}: with a loss function a batch is a tuple of the model's "
                    f"inputs and, last, the target; got "
                    f"{'a dictionary' if kwargs else f'{len(args)} tensor(s)'}. Or leave loss out, "
                    "and let forward return the loss."
                )
            *inputs, target = args
            output = self.model(*inputs)
            loss = self.loss(output, target)
        values = {LOSS: self._scalar(loss, "the loss")}
        for name, metric in self.metrics.items():
            with torch.no_grad():
                values[name] = self._scalar(metric(output, target), f"the metric '{name}'")
        return values

    def _loss_among(self, result: Any) -> tuple[torch.Tensor, Any]:
        """Return the loss in the result of a model, and the rest of the result."""
        if isinstance(result, torch.Tensor):
            return result, result
        if isinstance(result, Mapping):
            if LOSS not in result:
                raise UsageTypeError(
                    f"{self.function}: the model returns a dictionary without the key '{LOSS}', "
                    f"but with {', '.join(map(repr, result))}. Add it, or pass loss=."
                )
            rest = [value for name, value in result.items() if name != LOSS]
            return result[LOSS], _alone(rest)
        values = list(result) if isinstance(result, (list, tuple)) else []
        scalars = [x for x in values if isinstance(x, torch.Tensor) and x.numel() == 1]
        if len(scalars) != 1:
            raise UsageTypeError(
                f"{self.function}: the model returns a {type(result).__name__} with "
                f"{len(scalars)} scalars, and one of them has to be the loss. Return the output "
                f"and the loss, or a dictionary with the key '{LOSS}', or pass loss=."
            )
        return scalars[0], _alone([x for x in values if x is not scalars[0]])

    def _scalar(self, value: Any, what: str) -> torch.Tensor:
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            got = (
                f"a tensor of shape {tuple(value.shape)}"
                if isinstance(value, torch.Tensor)
                else f"a {type(value).__name__}"
            )
            raise UsageTypeError(
                f"{self.function}: {what} is {got}, but has to be a tensor of one number. "
                + (
                    "Pass loss=, or return a reduced loss."
                    if value is not None and what == "the loss"
                    else "Reduce it, for instance with mean()."
                )
            )
        return value.reshape(())


def _alone(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


def named_metrics(function: str, metrics: Metrics | None) -> dict[str, Metric]:
    """Return metrics by name.

    Args:
        function: The name of the caller, for messages.
        metrics: A mapping, or functions that have a name; the string ``"accuracy"`` is also
            accepted.

    Raises:
        UsageTypeError: A value is not a metric.
        UsageValueError: A name is unknown, or occurs twice.
    """
    if metrics is None:
        return {}
    pairs: list[tuple[str, Any]]
    if isinstance(metrics, Mapping):
        pairs = list(metrics.items())
    elif isinstance(metrics, (list, tuple)):
        pairs = [(_name_of(one), one) for one in metrics]
    else:
        pairs = [(_name_of(metrics), metrics)]
    named: dict[str, Metric] = {}
    for name, metric in pairs:
        if isinstance(metric, str):
            if metric != "accuracy":
                raise UsageValueError(
                    f"{function}: the metric {metric!r} is not known; 'accuracy' is. Others are "
                    "functions of the output and the target."
                )
            metric = _accuracy
        if not callable(metric):
            raise UsageTypeError(
                f"{function}: the metric '{name}' is a {type(metric).__name__}. Pass a function "
                "of the output and the target."
            )
        if name == LOSS or name in named:
            raise UsageValueError(
                f"{function}: there is more than one value called '{name}'. Give metrics names of "
                "their own: metrics={'name': function}."
            )
        named[name] = metric
    return named


def _name_of(metric: Any) -> str:
    name = metric if isinstance(metric, str) else getattr(metric, "__name__", None)
    return type(metric).__name__ if name is None else str(name)


def _accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the share of samples whose largest output is at the class of the target."""
    return (output.argmax(-1) == target).to(torch.float32).mean()


def inputs_of(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the part of a batch to call a model with, without a target that it cannot take."""
    if kwargs or len(args) < 2:
        return args, kwargs
    try:
        inspect.signature(model.forward).bind(*args)
    except TypeError:
        return args[:-1], kwargs
    except ValueError:  # a function without a signature
        pass
    return args, kwargs


@contextlib.contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model into training or evaluation mode, until the end of the scope."""
    before = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, value in before.items():
            module.training = value
