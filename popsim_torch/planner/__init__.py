"""``plan``: proposes how to run a model on several IPUs, with the simulated machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from popsim_torch import logs
from popsim_torch.enums import PipelineSchedule
from popsim_torch.errors import Error, UsageTypeError, UsageValueError
from popsim_torch.estimates import model_request
from popsim_torch.executor.compile import compile_program
from popsim_torch.executor.estimating import compilation_request
from popsim_torch.machine import estimate_program
from popsim_torch.options import Options
from popsim_torch.planner.layers import find_layers
from popsim_torch.planner.proposal import PipelinePlan, PlannedStage
from popsim_torch.planner.search import Alternative, Search
from popsim_torch.stages import ShardedExecution, assigned_stages
from popsim_torch.stages.schedules import micro_batches_in_flight

__all__ = ["Alternative", "PipelinePlan", "PlannedStage", "plan"]

_MOST_IPUS = 64


def plan(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_ipus: int,
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    accumulation: int | None = None,
) -> PipelinePlan:
    """Propose stages, schedule, recomputation and accumulation for a model on several IPUs.

    The model is traced once, and many ways to run it are estimated on the simulated machine
    (``Options.machine``): boundaries between modules, all schedules, with and without
    recomputation, one to ``num_ipus`` stages. The plan is the fastest of those that fit. Nothing
    runs; parameters may be on the device ``meta``. ``plan.apply(model, options)`` takes it over.

    Args:
        model: The module, without stages of its own.
        args: The arguments of one micro-batch: a tuple, or one argument that is not a tuple.
        kwargs: The keyword arguments.
        num_ipus: The largest number of IPUs.
        options: The options of the model, not changed; its replicas, precision and machine count.
        optimizer: The optimizer for training; None for inference.
        accumulation: Micro-batches per weight update (inference: per call). None for the count of
            the options if it is more than 1, else for the smallest count with which the pipeline is
            full for 90 % of the time.

    Returns:
        The plan, with the alternatives; it prints as tables.

    Raises:
        Error: The model cannot be compiled, or has stages of its own.
        UsageTypeError: An argument has the wrong type.
        UsageValueError: A count is out of range.
    """
    _check_count("num_ipus", num_ipus, _MOST_IPUS)
    if accumulation is not None:
        _check_count("accumulation", accumulation, None)
    if isinstance(model, nn.Module) and assigned_stages(model):
        raise Error(
            "plan: the model has stages of its own. Call reset_pipeline_stage_assignment(model) "
            "first, or removeBlocks(model)."
        )
    own = Options() if options is None else options.clone()
    given = own.Training.gradient_accumulation if optimizer is not None else own.device_iterations
    if accumulation is None and given > 1:
        accumulation = given
    _check_fills(accumulation, num_ipus, training=optimizer is not None)
    base = _base_request(model, args, kwargs, own, optimizer)
    estimate = estimate_program(base)
    layers = find_layers(model, base.program, estimate, num_ipus)
    if not layers:
        raise Error(
            f"plan: {type(model).__name__} calls no modules, so there is nothing to place on "
            "stages. Put the parts of forward into modules."
        )
    search = Search(base, layers, num_ipus, accumulation)
    found = search.run()
    even = search.even(found[0].candidate)
    cost = search.estimate(found[0].candidate)
    return PipelinePlan.of(found, even, cost, [layer.name for layer in layers])


def _base_request(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    options: Options,
    optimizer: torch.optim.Optimizer | None,
) -> Any:
    """Return the request to estimate the model on one stage, without recomputation."""
    options.deviceIterations(1)
    options.setExecutionStrategy(ShardedExecution())
    options.pipelineSchedule(PipelineSchedule.Default)
    options._Popart.set("autoRecomputation", 0)
    repeats = 1
    if optimizer is not None:
        # Two micro-batches: programs that accumulate have accumulators.
        repeats = 2
        options.Training.gradientAccumulation(repeats)
    repeats *= options.replication_factor
    request = model_request("plan", model, args, kwargs, options, optimizer)
    if repeats > 1:
        request = dataclasses.replace(
            request,
            args=tuple(_repeated(one, repeats) for one in request.args),
            kwargs={name: _repeated(one, repeats) for name, one in request.kwargs.items()},
        )
    return compilation_request(compile_program(request))


def _repeated(value: Any, count: int) -> Any:
    """Return the arguments of a call with several micro-batches like one."""
    if isinstance(value, torch.Tensor):
        return torch.cat([value] * count) if value.dim() else value
    if isinstance(value, (list, tuple)):
        return type(value)(_repeated(one, count) for one in value)
    if isinstance(value, dict):
        return {name: _repeated(one, count) for name, one in value.items()}
    return value


def _check_fills(accumulation: int | None, num_ipus: int, *, training: bool) -> None:
    """Warn if no pipeline can run so few micro-batches."""
    pipelines = (one for one in PipelineSchedule if one != PipelineSchedule.Sequential)
    least = min(micro_batches_in_flight(one, 2, training=training) for one in pipelines)
    if accumulation is not None and num_ipus > 1 and accumulation < least:
        logs.python.warning(
            "plan: accumulation=%d is too little for a pipeline of 2 stages, which needs %d or "
            "more: stages can only run one after another. Pass more, or leave it out.",
            accumulation,
            least,
        )


def _check_count(name: str, value: object, most: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageTypeError(f"plan: {name} is {value!r}. Pass an int.")
    if value < 1 or (most is not None and value > most):
        limit = "1 or more" if most is None else f"1 to {most}"
        raise UsageValueError(f"plan: {name} is {value}. Pass {limit}.")
