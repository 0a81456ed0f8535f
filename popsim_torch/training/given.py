"""Checks the arguments of ``fit``, ``evaluate`` and ``predict``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn

from popsim_torch.errors import Error, UsageTypeError, UsageValueError
from popsim_torch.executor.executor import PoplarExecutor
from popsim_torch.executor.observing import Observing
from popsim_torch.observe.record import RecordSink
from popsim_torch.options import Options

__all__ = ["BAR", "checked_verbose", "reader_of", "unwrapped"]

SILENT, BAR, LINE = 0, 1, 2


def unwrapped(
    function: str,
    model: object,
    options: Options | None,
    optimizer: torch.optim.Optimizer | None,
    sinks: Sequence[RecordSink] = (),
) -> tuple[nn.Module, Options, torch.optim.Optimizer | None]:
    """Return the module of a model, and its options and optimizer if none were given.

    Args:
        function: The caller, for messages.
        model: A module or an executor.
        options: The options that the user passes.
        optimizer: The optimizer that the user passes.
        sinks: The sinks that the user passes.

    Raises:
        UsageTypeError: An argument has a wrong type.
        UsageValueError: There is nobody to read what the options record.
        Error: There are sinks, and nothing is observed.
    """
    if options is not None and not isinstance(options, Options):
        raise UsageTypeError(
            f"{function}: options must be a poptorch.Options, got {type(options).__name__}."
        )
    if isinstance(model, PoplarExecutor):
        optimizer = model._use.optimizer if optimizer is None else optimizer
        options = _options_of(function, model) if options is None else options
        _check_observations(function, model, options, sinks)
        return model.model, options, optimizer
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
    _check_observations(function, model, options, sinks)
    return model, options, optimizer


def reader_of(model: object) -> Observing | None:
    """Return the object that gives what an executor observes; None if there is none."""
    if isinstance(model, PoplarExecutor) and model.options._observations:
        return model._observing
    return None


def _check_observations(
    function: str, model: object, options: Options, sinks: Sequence[RecordSink]
) -> None:
    """Refuse statistics that nobody gets; ``fit`` returns them."""
    if function == "fit":
        return
    if options._observations and not sinks and reader_of(model) is None:
        sink = ", or pass a sink of records among the callbacks" if function == "evaluate" else ""
        raise UsageValueError(
            f"{function}: the options observe tensors, and there is no executor to read the "
            "statistics from. Pass poptorch.inferenceModel(model, options) as the model, and call "
            f"its observations() afterwards{sink}."
        )
    trains = isinstance(model, PoplarExecutor) and model.training_mode
    if sinks and trains and not options._observations:
        raise Error(
            f"{function}: the options observe nothing, and there are sinks: an executor that "
            "trains observes in fit only. Pass poptorch.inferenceModel(model, options) as the "
            "model, with options that observe."
        )


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
