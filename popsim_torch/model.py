"""``trainingModel`` and ``inferenceModel``: the functions that wrap a user's model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import nn

from popsim_torch import optim
from popsim_torch.enums import OutputMode
from popsim_torch.errors import Error, UsageRuntimeError, UsageTypeError, UsageValueError
from popsim_torch.executor import host_weights
from popsim_torch.executor.base import HasForward
from popsim_torch.executor.executor import PoplarExecutor
from popsim_torch.executor.summary import ModelSummary
from popsim_torch.options import Options
from popsim_torch.options.model_settings import add_settings

__all__ = ["PoplarExecutor", "inferenceModel", "summary", "trainingModel"]

P = ParamSpec("P")
R = TypeVar("R")

_DEFAULT_LEARNING_RATE = 0.01
_WRAPPED = (
    "a model was wrapped with these options before, and would not see the change. Call it "
    "before trainingModel or inferenceModel. For a model that is wrapped and not compiled yet, "
    "call it on model.options; for another model, on a copy made with options.clone()."
)


def _checked_model(model: object, function: str) -> nn.Module:
    if isinstance(model, PoplarExecutor):
        model = model.model
    if not isinstance(model, nn.Module):
        raise Error(
            f"{function}: the model must be a torch.nn.Module or the result of trainingModel or "
            f"inferenceModel, got {type(model).__name__}."
        )
    return model


def _checked_options(
    options: object, function: str, default_mode: OutputMode, model: nn.Module
) -> Options:
    """Freeze the user's options and return the copy that the executor uses."""
    if options is None:
        options = Options()
    if not isinstance(options, Options):
        raise Error(
            f"{function}: options must be a poptorch.Options, got {type(options).__name__}."
        )
    options.freeze()
    options._take_anchors(trainingModel, _WRAPPED)  # (this owner is never deleted)
    own = options.clone()
    add_settings(own, model, training=function == "trainingModel")
    if own.defaultOutputMode():
        own.outputMode(default_mode)
    return own


@overload
def trainingModel(
    model: PoplarExecutor[P, R],
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> PoplarExecutor[P, R]: ...
@overload
def trainingModel(
    model: HasForward[P, R],
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> PoplarExecutor[P, R]: ...
def trainingModel(
    model: Any,
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Any:
    """Wrap a model for training on the device.

    Calling the result runs forward, backward and the optimizer's update
    ``deviceIterations`` times and returns what the model's forward returns. Nothing is compiled
    before the first call or ``compile``.

    Args:
        model: The module, or an executor whose module is used. Its forward must compute a loss.
        options: Frozen by this call; None for the defaults.
        optimizer: From ``poptorch.optim`` or ``torch.optim``; None for SGD with a learning rate of
            0.01 over all parameters.

    Raises:
        Error: Wrong types, or a buffer that is not exactly a ``torch.Tensor``.
        UsageRuntimeError: The model is already wrapped for training.
    """
    module = _checked_model(model, "trainingModel")
    if host_weights.is_wrapped(module):
        raise UsageRuntimeError(
            "trainingModel: this model has already been wrapped for training. Call destroy() on "
            "the executor or on the model first; an executor that was never compiled has to be "
            "dropped (del executor)."
        )
    for name, buffer in module.named_buffers():
        if type(buffer) is not torch.Tensor:
            raise Error(
                f"trainingModel: buffer '{name}' must be a torch.Tensor, got "
                f"{type(buffer).__name__}."
            )
    own = _checked_options(options, "trainingModel", OutputMode.Final, module)
    if optimizer is None:
        optimizer = optim.SGD(module.parameters(), lr=_DEFAULT_LEARNING_RATE)
    return PoplarExecutor(module, own, optimizer)


@overload
def inferenceModel(
    model: PoplarExecutor[P, R], options: Options | None = None
) -> PoplarExecutor[P, R]: ...
@overload
def inferenceModel(
    model: HasForward[P, R], options: Options | None = None
) -> PoplarExecutor[P, R]: ...
def inferenceModel(model: Any, options: Options | None = None) -> Any:
    """Wrap a model for inference on the device.

    Args:
        model: The module, or an executor whose module is used. Before each call, the new executor
            gets the weights that a training executor of the module has changed.
        options: Frozen by this call; None for the defaults. Gradient accumulation must be 1.

    Raises:
        Error: Wrong types, or a gradient accumulation other than 1.
    """
    module = _checked_model(model, "inferenceModel")
    own = _checked_options(options, "inferenceModel", OutputMode.All, module)
    accumulation = own.Training.gradient_accumulation
    if accumulation != 1:
        advice = (
            ", with poptorch.Options().deviceIterations for several micro-batches per call"
            if own.execution_strategy.is_pipelined
            else ""
        )
        raise Error(
            "inferenceModel: poptorch.Options().Training.gradientAccumulation must be 1, got "
            f"{accumulation}. Use separate options for inference{advice}."
        )
    return PoplarExecutor(module, own, None)


def summary(
    model: nn.Module | PoplarExecutor,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    depth: int | None = None,
    width: int | None = None,
    options: Options | None = None,
) -> ModelSummary:
    """Describe the modules of a model: shapes, parameters, bytes, stages, names for anchors.

    Nothing runs, and nothing changes. A module is described as it would be compiled for inference,
    in its current mode (training or evaluation).

    Args:
        model: A module, or an executor.
        args: The arguments of a call: a tuple, or one argument that is not a tuple. A compiled
            executor needs no arguments.
        kwargs: The keyword arguments of the call.
        depth: The number of levels of the printed tree; None for all levels.
        width: The width of the printed table (characters); None for the width of the terminal.
        options: The options to compile a module with; not allowed for an executor.

    Returns:
        A summary with a row for each module; it prints as a table.

    Raises:
        Error: The model is neither a module nor an executor, or cannot be compiled.
        UsageTypeError: ``args`` is a size, not tensors.
        UsageValueError: ``options`` are given for an executor, or a number is too small.
    """
    if isinstance(model, PoplarExecutor):
        if options is not None:
            raise UsageValueError(
                "summary: an executor has options of its own. Leave options out, or pass the "
                "module, executor.model."
            )
        executor = model
    else:
        executor = inferenceModel(_checked_model(model, "summary"), options)
    given = args if isinstance(args, tuple) else (args,)
    if given and all(type(one) is int for one in given):
        size = ", ".join(map(str, given))
        raise UsageTypeError(
            f"summary: the arguments are integers, ({size}). Pass tensors, as in a call: "
            f"summary(model, torch.zeros({size}))."
        )
    return executor.summary(*given, depth=depth, width=width, **(kwargs or {}))
