"""An optimizer that enqueues the gradients of another optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from popsim_torch.enums import OutfeedOptimizerMode
from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.ir import names
from popsim_torch.observe.queue import MaybeOutfeedQueue
from popsim_torch.optim.captures import GradientCapture, ObservedOptimizer

__all__ = ["OutfeedOptimizer", "gradient_names"]

_OWN = frozenset({"wrapped", "queue", "mode", "model", "step"})


class OutfeedOptimizer(ObservedOptimizer):
    """Wraps an optimizer, and enqueues the gradients that the optimizer gets.

    It can be used in place of the wrapped optimizer: groups, state, learning rate schedules and
    state dictionaries are those of the wrapped optimizer. In a program every gradient is offered to
    the queue as ``<parameter>_grad``, the last parameter of the model first; those that pass the
    filters are enqueued as one dictionary. Filters may also use the name
    ``Gradient___<parameter>``.

    The gradients are multiplied by the optimizer's ``loss_scaling``, and are not clipped yet.

    Args:
        wrapped: From ``poptorch.optim`` or ``torch.optim``, or another ``OutfeedOptimizer``.
        queue: The queue for the gradients, and for nothing else.
        outfeed_optimizer_mode: Whether to enqueue the gradients of one micro-batch, or those
            accumulated over all micro-batches of an update: their sum or mean, as set in the
            options.
        model: The model with the parameters and their names; None for the model that is trained.

    Raises:
        UsageTypeError: The optimizer, the queue or the mode is something else.
        UsageValueError: The model does not have the optimizer's parameters; or ``model`` is None,
            although the optimizer is bound to another model that is already compiled.
    """

    def __init__(
        self,
        wrapped: torch.optim.Optimizer,
        queue: MaybeOutfeedQueue,
        outfeed_optimizer_mode: OutfeedOptimizerMode = OutfeedOptimizerMode.BEFORE_APPLY,
        model: nn.Module | None = None,
    ) -> None:
        # Do not call torch's constructor: groups and state are those of the wrapped optimizer.
        if not isinstance(wrapped, torch.optim.Optimizer):
            raise UsageTypeError(
                "OutfeedOptimizer: can wrap optimizers only, got a "
                f"{type(wrapped).__name__}. Pass one of poptorch.optim or torch.optim."
            )
        if not isinstance(queue, MaybeOutfeedQueue):
            raise UsageTypeError(
                f"OutfeedOptimizer: the queue is a {type(queue).__name__}. Pass a "
                "poptorch.MaybeOutfeedQueue; without filters it takes every gradient."
            )
        if not isinstance(outfeed_optimizer_mode, OutfeedOptimizerMode):
            raise UsageTypeError(
                "OutfeedOptimizer: outfeed_optimizer_mode has to be a "
                f"poptorch.OutfeedOptimizerMode, got {outfeed_optimizer_mode!r}."
            )
        self.wrapped = wrapped
        self.queue = queue
        self.mode = outfeed_optimizer_mode
        self.model = _checked_model(model, wrapped)

    def capture(self) -> GradientCapture:
        """Return the description of the gradients to capture, and of their queue."""
        known = {} if self.model is None else {id(p): name for name, p in _named(self.model)}
        return GradientCapture(self.queue, self.mode, known)

    def dry_run(self) -> str:
        """Print and return which gradients would be observed, and the bytes of an element.

        Dtypes are those of the parameters; accumulated gradients of half parameters are mostly
        float32.

        Raises:
            UsageValueError: The optimizer was made without a model.
        """
        if self.model is None:
            raise UsageValueError(
                "OutfeedOptimizer.dry_run: the model must be specified, for the names of its "
                "parameters: OutfeedOptimizer(..., model=model)."
            )
        return self.queue.dry_run(self._offer)

    def _offer(self) -> None:
        assert self.model is not None
        parameters = dict(_named(self.model))
        keys = {key: parameters[name] for name, key, _ in _names(self.model)}
        self.queue.take_gradients(keys)

    # Methods of the wrapped optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let the wrapped optimizer update the weights, on the host."""
        return self.wrapped.step() if closure is None else self.wrapped.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the wrapped optimizer's parameters, on the host."""
        self.wrapped.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.wrapped.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state."""
        return self.wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the wrapped optimizer's state, from a dictionary of either optimizer."""
        self.wrapped.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:
            raise AttributeError(f"'OutfeedOptimizer' object has no attribute '{name}'")
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A scheduler replaces ``step`` of the object that it gets.
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.wrapped, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in _OWN - {"step"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __repr__(self) -> str:
        return f"OutfeedOptimizer({self.wrapped!r}, {self.mode})"


def gradient_names(model: nn.Module) -> dict[str, str]:
    """Return both names of each gradient: its key in a queue, and its name for anchors.

    Args:
        model: The model with the parameters; the last parameter comes first, as in a queue.
    """
    return {key: anchor for _, key, anchor in _names(model)}


def _names(model: nn.Module) -> Iterator[tuple[str, str, str]]:
    for name, parameter in reversed(list(_named(model))):
        if parameter.requires_grad:
            yield name, names.gradient_key(name), names.gradient(name)


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return nn.Module.named_parameters(model)


def _checked_model(model: object, wrapped: torch.optim.Optimizer) -> nn.Module | None:
    if model is None:
        if getattr(wrapped, "_device", None) is not None:
            raise UsageValueError(
                f"OutfeedOptimizer: this {type(wrapped).__name__} is bound to a model that is "
                "compiled already, so the model must be specified: "
                "OutfeedOptimizer(..., model=model)."
            )
        return None
    if not isinstance(model, nn.Module):
        model = getattr(model, "model", model)  # unwrap the result of trainingModel
    if not isinstance(model, nn.Module):
        raise UsageTypeError(
            f"OutfeedOptimizer: model has to be a torch.nn.Module, got a {type(model).__name__}."
        )
    known = {id(parameter) for _, parameter in _named(model)}
    for index, group in enumerate(wrapped.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise UsageValueError(
                    f"OutfeedOptimizer: parameter {position} of group {index}, of shape "
                    f"{tuple(parameter.shape)}, is not in the given model. Pass the model that the "
                    "optimizer was made for."
                )
    return model
