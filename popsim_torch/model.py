"""``trainingModel`` and ``inferenceModel``: what a PopTorch program wraps its model with."""

from __future__ import annotations

import torch
from torch import nn

from popsim_torch import optim
from popsim_torch.enums import OutputMode
from popsim_torch.errors import Error, UsageRuntimeError
from popsim_torch.executor import host_weights
from popsim_torch.executor.executor import PoplarExecutor
from popsim_torch.options import Options
from popsim_torch.options.limits import check_limits
from popsim_torch.options.model_settings import add_settings

__all__ = ["PoplarExecutor", "inferenceModel", "trainingModel"]

_DEFAULT_LEARNING_RATE = 0.01
_WRAPPED = (
    "a model was wrapped with these options before, and would not notice. Register anchors before "
    "trainingModel or inferenceModel is called. For a model that is wrapped and not compiled yet, "
    "use model.options.anchorTensor; for another model, a copy made with options.clone()."
)


def _checked_model(model: object, function: str) -> nn.Module:
    if isinstance(model, PoplarExecutor):
        model = model.model
    if not isinstance(model, nn.Module):
        raise Error(
            f"{function}: the model must be a torch.nn.Module or what trainingModel or "
            f"inferenceModel returned, got {type(model).__name__}."
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
    check_limits(options)
    options.freeze()
    options._take_anchors(_WRAPPED)
    own = options.clone()
    add_settings(own, model, training=function == "trainingModel")
    if own.defaultOutputMode():
        own.outputMode(default_mode)
    return own


def trainingModel(
    model: nn.Module | PoplarExecutor,
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> PoplarExecutor:
    """Wrap a model for training on the device.

    Calling the result runs forward, backward and the optimizer's update
    ``deviceIterations`` times and returns what the model's forward returns. Nothing is compiled
    before the first call or ``compile``.

    Args:
        model: The module, or an executor whose module is taken. Its forward has to compute a loss.
        options: Frozen by this call; None for the defaults.
        optimizer: From ``poptorch.optim`` or ``torch.optim``; None for SGD with a learning rate of
            0.01 over all parameters.

    Raises:
        Error: Wrong types, or a buffer that is not exactly a ``torch.Tensor``.
        UsageRuntimeError: The model is wrapped for training already.
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


def inferenceModel(
    model: nn.Module | PoplarExecutor, options: Options | None = None
) -> PoplarExecutor:
    """Wrap a model for inference on the device.

    Args:
        model: The module, or an executor whose module is taken. Weights that a training executor
            changes arrive here before each call.
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
            f"{accumulation}. Use options of their own for inference{advice}."
        )
    return PoplarExecutor(module, own, None)
