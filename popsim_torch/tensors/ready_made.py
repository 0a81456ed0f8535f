"""Selections by kind, module, dtype and stage."""

from __future__ import annotations

import torch

from popsim_torch.errors import UsageTypeError
from popsim_torch.tensors.selections import OfDtype, OfKind, OfModule, OfStage, Selection

__all__ = [
    "activations",
    "buffers",
    "gradients",
    "inputs",
    "of_dtype",
    "of_module",
    "of_stage",
    "states",
    "updates",
    "weights",
]


def gradients() -> Selection:
    """Select gradients: of weights, and of activations and inputs.

    ``gradients() & "*.weight"`` are those of the parameters of this name.
    """
    return OfKind(("gradient",))


def activations() -> Selection:
    """Select results of the forward pass."""
    return OfKind(("activation",))


def weights() -> Selection:
    """Select the parameters of the model, as a micro-batch uses them."""
    return OfKind(("weight",))


def buffers() -> Selection:
    """Select the buffers of the model."""
    return OfKind(("buffer",))


def inputs() -> Selection:
    """Select the inputs of the model."""
    return OfKind(("input",))


def updates() -> Selection:
    """Select the parameters after their update."""
    return OfKind(("updated weight",))


def states() -> Selection:
    """Select what the optimizer keeps for each parameter, and accumulated gradients."""
    return OfKind(("optimizer state",))


def of_module(pattern: str) -> Selection:
    """Select the tensors of modules, also those of the modules inside of them.

    Args:
        pattern: A pattern for the path of the module: ``"encoder.layer*"``.

    Raises:
        UsageTypeError: It is not a string.
    """
    if not isinstance(pattern, str):
        raise UsageTypeError(
            f"of_module: got a {type(pattern).__name__}, need a pattern for the path of a module, "
            "such as 'encoder.layer*'."
        )
    return OfModule(pattern)


def of_dtype(*dtypes: torch.dtype) -> Selection:
    """Select tensors by their dtype on the device.

    Args:
        *dtypes: One or more dtypes, such as ``torch.float16``.

    Raises:
        UsageTypeError: One of them is not a ``torch.dtype``, or there are none.
    """
    if not dtypes or not all(isinstance(one, torch.dtype) for one in dtypes):
        raise UsageTypeError(f"of_dtype: need dtypes such as torch.float16, got {dtypes!r}.")
    return OfDtype(dtypes)


def of_stage(*stages: int) -> Selection:
    """Select tensors by their pipeline stage.

    Args:
        *stages: One or more numbers of stages, counted from 0.

    Raises:
        UsageTypeError: One of them is not an integer, or there are none.
    """
    if not stages or not all(type(one) is int for one in stages):
        raise UsageTypeError(f"of_stage: need numbers of stages, got {stages!r}.")
    return OfStage(stages)
