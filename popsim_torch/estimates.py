"""``estimate``: what a module would cost on an IPU, without an executor and without weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from popsim_torch import profiling
from popsim_torch.enums import OutputMode
from popsim_torch.errors import Error, UsageTypeError, UsageValueError
from popsim_torch.executor.compile_request import ModelRequest
from popsim_torch.executor.estimating import request_estimate
from popsim_torch.executor.executor import PoplarExecutor
from popsim_torch.machine import Estimate
from popsim_torch.optim.planning import read_optimizer
from popsim_torch.options import Options
from popsim_torch.options.model_settings import add_settings
from popsim_torch.shallow_copies import shallow_copy

__all__ = ["estimate", "model_request"]


def model_request(
    where: str,
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    options: Options | None,
    optimizer: torch.optim.Optimizer | None,
) -> ModelRequest:
    """Return the request to compile a module for a call, without an executor.

    Args:
        where: The caller, for messages.
        model: The module; its parameters may be on the device ``meta``.
        args: The arguments of a call: a tuple, or one argument that is not a tuple.
        kwargs: The keyword arguments of the call.
        options: The options, which are not frozen; None for the defaults.
        optimizer: The optimizer for training; None for inference.

    Raises:
        UsageTypeError: An argument has the wrong type.
    """
    if not isinstance(model, nn.Module):
        raise UsageTypeError(
            f"{where}: the model must be a torch.nn.Module, got {type(model).__name__}."
        )
    if options is not None and not isinstance(options, Options):
        raise UsageTypeError(
            f"{where}: options must be a poptorch.Options, got {type(options).__name__}."
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageTypeError(
            f"{where}: optimizer must be a torch.optim.Optimizer or None, got "
            f"{type(optimizer).__name__}."
        )
    own = Options() if options is None else options.clone()
    training = optimizer is not None
    add_settings(own, model, training=training)
    if own.defaultOutputMode():
        own.outputMode(OutputMode.Final if training else OutputMode.All)
    given = args if isinstance(args, tuple) else (args,)
    return ModelRequest(
        shallow_copy(model),
        own,
        profiling.Channel(f"poptorch.{where}"),
        given,
        dict(kwargs or {}),
        None if optimizer is None else read_optimizer(optimizer),
        needs_values=False,
    )


def estimate(
    model: nn.Module | PoplarExecutor,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Estimate:
    """Return what a module would cost on an IPU: cycles, memory, time; all simulated.

    The module is traced, but nothing runs and no weights are allocated: parameters, buffers and
    arguments may be on the device ``meta``. Buffers whose values ``forward`` needs in the trace
    must have values. ``Options.machine`` chooses the machine.

    Args:
        model: A module, or an executor.
        args: The arguments of a call: a tuple, or one argument that is not a tuple. A compiled
            executor needs no arguments.
        kwargs: The keyword arguments of the call.
        options: The options of the model, not frozen by this call; not allowed for an executor.
        optimizer: The optimizer for training, over the module's parameters; None for inference. Not
            allowed for an executor.

    Returns:
        The estimate; it prints as a summary.

    Raises:
        Error: The model cannot be compiled.
        UsageTypeError: An argument has the wrong type.
        UsageValueError: ``options`` or ``optimizer`` are given for an executor.

    Example:
        ::

            with torch.device("meta"):
                model = Transformer()
            print(poptorch.estimate(model, torch.empty(8, 128, device="meta")))
    """
    if isinstance(model, PoplarExecutor):
        if options is not None or optimizer is not None:
            raise UsageValueError(
                "estimate: an executor has options and an optimizer of its own. Leave them out, "
                "or pass the module, executor.model."
            )
        given = args if isinstance(args, tuple) else (args,)
        found: Estimate = model.estimate(*given, **dict(kwargs or {}))
        return found
    request = model_request("estimate", model, args, kwargs, options, optimizer)
    if optimizer is None and request.options.Training.gradient_accumulation != 1:
        raise Error(
            "estimate: Options.Training.gradientAccumulation is "
            f"{request.options.Training.gradient_accumulation}, and without an optimizer the "
            "estimate is for inference. Pass optimizer=, or options for inference."
        )
    return request_estimate(request)
