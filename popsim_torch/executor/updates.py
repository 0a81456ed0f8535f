"""The updates that optimizers apply to the weights of a traced program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import nn

from popsim_torch.enums import MeanReductionStrategy, ReductionType
from popsim_torch.errors import Error
from popsim_torch.executor.numerics import Numerics
from popsim_torch.optim.captures import GradientCapture
from popsim_torch.optim.plan import OptimizerPlan
from popsim_torch.optim.planning import OptimizerSettings, join_plans, plan_updates
from popsim_torch.optimizer_steps import trace_updates
from popsim_torch.options import Options, check_accumulation_dtype, own_dtype
from popsim_torch.options.limits import num_replicas
from popsim_torch.trace import TraceResult

__all__ = ["check_steps", "device_loop_plan", "divides_sum", "lacks_running_mean", "make_plan"]


def lacks_running_mean(optimizer: OptimizerSettings, options: Options) -> bool:
    """Return whether an optimizer needs accumulators with a mean, but the options ask for a sum.

    Args:
        optimizer: The values of the optimizer; float16 accumulators would overflow in a sum.
        options: They say how gradients are accumulated.
    """
    training = options.Training
    return (
        optimizer.forces_running_mean
        and training.accumulation_and_replication_reduction_type == ReductionType.Mean
        and training.meanAccumulationAndReplicationReductionStrategy
        != MeanReductionStrategy.Running
    )


def divides_sum(options: Options) -> bool:
    """Return whether accumulators hold a sum that the update divides by the number of gradients."""
    training = options.Training
    return (
        training.accumulation_and_replication_reduction_type == ReductionType.Mean
        and training.meanAccumulationAndReplicationReductionStrategy
        != MeanReductionStrategy.Running
    )


def make_plan(
    optimizer: OptimizerSettings,
    options: Options,
    module: nn.Module,
    trained: Sequence[str],
    loss_scale: str,
) -> OptimizerPlan:
    """Return the updates that an optimizer applies to the parameters with a gradient.

    Args:
        optimizer: The values of the optimizer.
        options: Gradient accumulation and reduction are read from here.
        module: The module with the parameters.
        trained: Names of the parameters that have a gradient.
        loss_scale: Name of the tensor that holds the loss scale.
    """
    training = options.Training
    parameters = dict(module.named_parameters())
    return plan_updates(
        optimizer,
        {name: parameters[name] for name in trained},
        all_parameters=parameters,
        gradient_accumulation=training.gradient_accumulation,
        replicas=num_replicas(options),
        replicas_here=options.replication_factor,
        reduction=ReductionType(training.accumulation_and_replication_reduction_type),
        running_mean=training.meanAccumulationAndReplicationReductionStrategy
        == MeanReductionStrategy.Running,
        accumulator_dtype=_accumulator_dtype(options, optimizer),
        loss_scale_rule=Numerics.of(options).loss_scale_rule,
        loss_scale=loss_scale,
        trace=trace_updates,
    )


def _accumulator_dtype(
    options: Options, optimizer: OptimizerSettings
) -> Callable[[nn.Parameter], torch.dtype | None] | None:
    """Return the dtype of a parameter's accumulator, if the options set one."""
    chosen = options.Training.gradient_accumulation_dtype
    if chosen is None:
        return None
    if chosen is own_dtype and (
        optimizer.rule.combined or optimizer.rule.accum_type is torch.float16
    ):
        return None  # the dtype that the optimizer was made with
    where = "Options.Training.gradientAccumulationDtype"

    def dtype_of(parameter: nn.Parameter) -> torch.dtype:
        dtype = chosen(parameter) if callable(chosen) else chosen
        return check_accumulation_dtype(where, dtype)

    return dtype_of


def device_loop_plan(
    settings: Sequence[OptimizerSettings],
    options: Options,
    module: nn.Module,
    traced: TraceResult,
    loss_scale: str,
) -> OptimizerPlan | None:
    """Return the updates of the optimizers that the body of a loop steps.

    Args:
        settings: The values of the optimizers; each one has the parameters that it updates.
        options: See ``make_plan``.
        module: The body.
        traced: The trace of the body.
        loss_scale: Name of the tensor that holds the loss scale.

    Returns:
        The plan of all updates; None if the body computes no gradients.
    """
    if not traced.has_backward:
        return None
    plans = []
    for one in settings:
        own = {id(parameter) for group in one.groups for parameter in group.parameters}
        trained = [name for name in traced.trained if id(traced.parameters[name]) in own]
        plans.append(make_plan(one, options, module, trained, loss_scale))
    return join_plans(plans, loss_scale)


def check_steps(
    traced: TraceResult,
    plan: OptimizerPlan | None,
    captures: Sequence[GradientCapture],
    *,
    accumulation: int,
    num_stages: int,
    num_replicas: int = 1,
) -> None:
    """Refuse settings that do not allow a change of weights inside an iteration.

    Args:
        traced: The trace of the body of a loop.
        plan: The updates of the body.
        captures: The gradients that go into queues.
        accumulation: Number of iterations per weight update.
        num_stages: Pipeline stages (count).
        num_replicas: Replicas that train together, in all processes (count).

    Raises:
        Error: A setting does not allow it; the message says why the weights change there.
    """
    steps = list(traced.steps.values())
    if not steps:
        return
    first = steps[0]
    begin = f"optimizer.step(){first.source} has to change '{first.parameters[0]}' at once:"
    if accumulation > 1:
        raise Error(
            f"{begin} {first.why_at_once}. With gradient_accumulation={accumulation} weights "
            f"change once per {accumulation} iterations, at their end. Do that before step(), "
            "or leave gradient_accumulation out and call step() on the sum of several losses."
        )
    if num_stages > 1:
        raise Error(
            f"{begin} {first.why_at_once}. With {num_stages} pipeline stages weights change only "
            "at the end of an iteration, when all stages have finished it. Do that before step(), "
            "or put the body on one stage."
        )
    if num_replicas > 1:
        raise Error(
            f"{begin} {first.why_at_once}. With {num_replicas} replicas, in all processes, weights "
            "change only at the end of an iteration, by the gradients of all replicas. Do that "
            "before step(), or call options.Distributed.disable() to train in each process alone."
        )
    if plan is not None and plan.loss_scale_rule is not None:
        raise Error(
            f"{begin} {first.why_at_once}. Automatic loss scaling reads all gradients at the "
            "end of an iteration. Do that before step(), or set the loss scale with the "
            "optimizer's loss_scaling."
        )
    times = Counter(name for step in steps for name in step.parameters)
    times.update(traced.gradients)
    name, most = times.most_common(1)[0]
    if captures and most > 1:
        raise Error(
            f"OutfeedOptimizer: the iteration has {most} gradients of '{name}', one for each "
            "step(), but an element of its queue has space for only one. Enqueue parameter.grad in "
            "the body instead."
        )
