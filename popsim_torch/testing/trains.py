"""``assert_trains``: a test that a model learns, and of what breaks when it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.model import trainingModel
from popsim_torch.options import Options
from popsim_torch.tensors.selections import Select, as_selection
from popsim_torch.testing.measuring import TrainingMeasures, anchored_options, measure
from popsim_torch.testing.rules import Limits, broken_rules

__all__ = ["assert_trains"]


class _WithLoss(nn.Module):
    """A model together with its loss, as one module of the names of the model."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, x: Any, labels: Any) -> Any:
        return self.loss(self.model(x), labels)


def assert_trains(
    model: nn.Module,
    data: Iterable[Any],
    steps: int = 20,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    options: Options | None = None,
    loss_falls_by: float | None = 0.0,
    most_update_ratio: float | None = 0.1,
    dead_share: float | None = 0.9,
    frozen: Select | None = None,
) -> TrainingMeasures:
    """Train a model for some steps, and check that it learns.

    These are the rules:

    * The loss, all gradients and the gradients of all activations are finite in every step. The
      first step that breaks this rule ends the training.
    * The loss falls: its mean over the last quarter of the steps is smaller than over the first
      quarter.
    * Every parameter has a gradient that is not 0 everywhere in all steps, and changes.
    * No ReLU is dead: in at least one step, less than ``dead_share`` of its values are 0.
    * No update explodes: the norm of the update of a weight is at most ``most_update_ratio`` times
      the norm of the weight, in every step. The rule is for parameters with two or more dimensions:
      biases often begin at 0.

    Afterwards the model has its weights from before the call.

    Args:
        model: A module that returns its loss, alone or last, from a call with a batch. With
            ``loss`` it returns the argument of the loss.
        data: The batches, such as a list or a ``DataLoader``: each is the arguments of a call, with
            the size of a combined batch. They are repeated if there are fewer than ``steps``.
        steps: The number of calls.
        loss: A function of the model's result and the second tensor of a batch, such as
            ``torch.nn.CrossEntropyLoss()``; None if the model computes its loss.
        optimizer: The optimizer of the model's parameters; None for SGD with learning rate 0.01.
        options: The options; None for the defaults. They are copied.
        loss_falls_by: The share of the loss by which it has to fall: 0.1 is a tenth. None for a
            loss that may rise.
        most_update_ratio: See above; None for no limit.
        dead_share: See above; None for no limit.
        frozen: The parameters that are not to be trained, a selection by name (``"encoder.*"``, see
            ``poptorch.tensors``); a parameter with ``requires_grad=False`` that is not selected
            breaks a rule.

    Returns:
        What was measured.

    Raises:
        AssertionError: At least one rule is broken. The text has a line for each tensor that breaks
            a rule, with its numbers, the limit, and what to try.
        UsageTypeError: The model is not a module, or the data cannot be iterated over.
        UsageValueError: ``steps`` is not a positive integer, there is no data, or the model does
            not return its loss.
        Error: The model cannot be compiled for training.
    """
    if not isinstance(model, nn.Module):
        raise UsageTypeError(
            f"assert_trains: the model is a {type(model).__name__}. Pass a torch.nn.Module; of an "
            "executor that is executor.model."
        )
    if type(steps) is not int or steps < 1:
        raise UsageValueError(f"assert_trains: steps={steps!r}; pass a positive integer.")
    selection = None if frozen is None else as_selection("assert_trains: frozen", frozen)
    limits = Limits(loss_falls_by, most_update_ratio, dead_share, selection)
    measures = _measure(model, data, steps, loss, optimizer, options)
    broken = broken_rules(measures, dict(model.named_parameters()), limits)
    if broken:
        raise AssertionError(_text(type(model).__name__, broken, measures))
    return measures


def _measure(
    model: nn.Module,
    data: Iterable[Any],
    steps: int,
    loss: Callable[..., Any] | None,
    optimizer: torch.optim.Optimizer | None,
    options: Options | None,
) -> TrainingMeasures:
    """Train the model, measure, and give the model its weights back."""
    before = {name: value.detach().clone() for name, value in _values(model).items()}
    whole = model if loss is None else _WithLoss(model, loss)
    executor = trainingModel(whole, anchored_options(options), optimizer)
    try:
        return measure(executor, data, steps, wrapped=loss is not None)
    finally:
        executor.destroy()
        with torch.no_grad():
            for name, value in _values(model).items():
                value.copy_(before[name])


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and all buffers of a model, by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _text(model: str, broken: list[str], measures: TrainingMeasures) -> str:
    rules = f"{len(broken)} rule{'s' if len(broken) > 1 else ''}"
    steps = f"{measures.num_steps} step{'s' if measures.num_steps > 1 else ''}"
    lines = [f"{number}. {line}" for number, line in enumerate(broken, 1)]
    return "\n".join([f"{model} breaks {rules} of training in {steps}:", *lines])
