"""Checks the arguments of ``fit``, ``evaluate`` and ``predict``."""

from __future__ import annotations

import sys

import torch
from torch import nn

from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.executor.executor import PoplarExecutor
from popsim_torch.options import Options

__all__ = ["BAR", "checked_verbose", "unwrapped"]

SILENT, BAR, LINE = 0, 1, 2


def unwrapped(
    function: str,
    model: object,
    options: Options | None,
    optimizer: torch.optim.Optimizer | None,
) -> tuple[nn.Module, Options, torch.optim.Optimizer | None]:
    """Return the module of a model, and its options and optimizer if none were given."""
    if options is not None and not isinstance(options, Options):
        raise UsageTypeError(
            f"{function}: options must be a poptorch.Options, got {type(options).__name__}."
        )
    if isinstance(model, PoplarExecutor):
        optimizer = model._use.optimizer if optimizer is None else optimizer
        return model.model, _options_of(function, model) if options is None else options, optimizer
    if not isinstance(model, nn.Module):
        raise UsageTypeError(
            f"{function}: the model is a {type(model).__name__}. Pass a torch.nn.Module, or the "
            "result of poptorch.trainingModel or poptorch.inferenceModel."
        )
    options = Options() if options is None else options
    if function != "fit" and options.anchored_tensors:
        raise UsageValueError(
            f"{function}: the options have anchors ({', '.join(options.anchored_tensors)}), and "
            "there is no executor to read them from. Pass poptorch.inferenceModel(model, options) "
            "as the model, and call its getAnchoredTensor afterwards."
        )
    if function != "fit" and options._observations:
        raise UsageValueError(
            f"{function}: the options observe tensors, and there is no executor to read the "
            "statistics from. Pass poptorch.inferenceModel(model, options) as the model, and call "
            "its observations() afterwards."
        )
    return model, options, optimizer


def _options_of(function: str, executor: PoplarExecutor) -> Options:
    """Return the options of an executor; ``fit`` alone anchors and observes for one that trains."""
    if function == "fit" or not executor.training_mode:
        return executor.options
    options = executor.options.clone()
    options.anchored_tensors.clear()
    options._observations.clear()
    return options.freeze()


def checked_verbose(function: str, verbose: object) -> int:
    """Return what to print: ``SILENT``, ``BAR`` or ``LINE``."""
    if verbose == "auto":
        return BAR if sys.stderr.isatty() else LINE
    if verbose not in (SILENT, BAR, LINE):
        raise UsageValueError(
            f"{function}: verbose must be 0, 1, 2 or 'auto', got {verbose!r}. 0 prints nothing, 1 "
            "a progress bar and lines, 2 only lines."
        )
    assert isinstance(verbose, int)
    return verbose
