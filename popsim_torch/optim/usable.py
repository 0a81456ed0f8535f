"""Refuses optimizers that are no usable optimizers of PyTorch, whatever they compute."""

from __future__ import annotations

import torch

from popsim_torch.errors import UsageAssertionError
from popsim_torch.optim.step_source import is_initialised, replaced_step

__all__ = ["check_usable"]


def check_usable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose steps the device cannot make.

    Args:
        optimizer: Any optimizer.

    Raises:
        AssertionError: Its class has not initialised it, its step has been replaced, or it has a
            parameter twice.
    """
    _check_initialised(optimizer)
    _check_step_of_class(optimizer)
    _check_parameters_once(optimizer)


def _check_initialised(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose class does not call the initialisation of PyTorch's.

    (A wrapper of another optimizer, which seldom does, is refused for that later.)

    Raises:
        AssertionError: It is one of them.
    """
    inner = any(isinstance(one, torch.optim.Optimizer) for one in vars(optimizer).values())
    if not inner and not is_initialised(optimizer):
        name = type(optimizer).__name__
        raise UsageAssertionError(
            f"Unsupported optimizer {name}: it has no state and no defaults yet. "
            f"{name}.__init__ has to call super().__init__(parameters, defaults)."
        )


def _check_step_of_class(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose step has been replaced; the device does what its class does.

    Raises:
        AssertionError: It is one of them.
    """
    place = replaced_step(optimizer)
    if place:
        name = type(optimizer).__name__
        raise UsageAssertionError(
            f"The step of this {name} has been replaced (optimizer.step = ..., by {place}). "
            f"The device does what the step of the class does: derive a class from {name} and "
            "define step there, or add a hook with optimizer.register_step_pre_hook."
        )


def _check_parameters_once(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that has a parameter twice; eager PyTorch updates it twice.

    Raises:
        AssertionError: It is one of them.
    """
    every = [id(one) for group in optimizer.param_groups for one in group["params"]]
    if len(set(every)) < len(every):
        raise UsageAssertionError(
            f"This {type(optimizer).__name__} has a parameter more than once. The device updates "
            "each parameter once in a step: leave the repeated ones out (a tied weight is one)."
        )
