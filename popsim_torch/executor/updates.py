"""What optimizers do to the weights of a traced program."""

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
from popsim_torch.options import Options, check_accumulation_dtype, own_dtype
from popsim_torch.trace import TraceResult

__all__ = ["check_steps", "device_loop_plan", "lacks_running_mean", "make_plan"]


def lacks_running_mean(optimizer: OptimizerSettings, options: Options) -> bool:
    """Return whether an optimizer needs accumulators that hold a mean, and options say otherwise.

    Args:
        optimizer: Its values; half-precision accumulators would overflow in a sum.
        options: Say how gradients are accumulated.
    """
    training = options.Training
    return (
        optimizer.forces_running_mean
        and training.accumulation_and_replication_reduction_type == ReductionType.Mean
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
    """Return what an optimizer does to the parameters that have a gradient.

    Args:
        optimizer: Its values.
        options: Gradient accumulation and reduction are taken from here.
        module: Has the parameters.
        trained: Names of those that have a gradient.
        loss_scale: Name of the loss scale's tensor.
    """
    training = options.Training
    parameters = dict(module.named_parameters())
    return plan_updates(
        optimizer,
        {name: parameters[name] for name in trained},
        all_parameters=parameters,
        gradient_accumulation=training.gradient_accumulation,
        reduction=ReductionType(training.accumulation_and_replication_reduction_type),
        running_mean=training.meanAccumulationAndReplicationReductionStrategy
        == MeanReductionStrategy.Running,
        accumulator_dtype=_accumulator_dtype(options, optimizer),
        loss_scale_rule=Numerics.of(options).loss_scale_rule,
        loss_scale=loss_scale,
    )


def _accumulator_dtype(
    options: Options, optimizer: OptimizerSettings
) -> Callable[[nn.Parameter], torch.dtype | None] | None:
    """Return what options say of the element type of a parameter's accumulator."""
    chosen = options.Training.gradient_accumulation_dtype
    if chosen is None:
        return None
    if chosen is own_dtype and (
        optimizer.rule.combined or optimizer.rule.accum_type is torch.float16
    ):
        return None  # (that is what the optimizer was made with)
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
    """Return what the optimizers do that the body of a loop steps.

    Args:
        settings: Their values; each has the parameters that it updates.
        options: As for ``make_plan``.
        module: The body.
        traced: Its trace.
        loss_scale: Name of the loss scale's tensor.

    Returns:
        The plan of all updates; None where no gradients are computed.
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
) -> None:
    """Refuse what does not go together with weights that change in the middle of an iteration.

    Args:
        traced: The body of a loop.
        plan: Its updates.
        captures: Gradients that go into queues.
        accumulation: Iterations of which one updates the weights (count).
        num_stages: Pipeline stages (count).

    Raises:
        Error: It does not, and why the weights change there.
    """
    steps = list(traced.steps.values())
    if not steps:
        return
    first = steps[0]
    begin = f"optimizer.step(){first.source} has to change '{first.parameters[0]}' at once:"
    if accumulation > 1:
        raise Error(
            f"{begin} {first.why_at_once}. With gradient_accumulation={accumulation} weights "
            f"change once for {accumulation} iterations, at their end. Do that in front of step(), "
            "or leave gradient_accumulation out and call step() on the sum of several losses."
        )
    if num_stages > 1:
        raise Error(
            f"{begin} {first.why_at_once}. With {num_stages} pipeline stages weights change at the "
            "end of an iteration only, when all stages are done with it. Do that in front of "
            "step(), or put the body on one stage."
        )
    if plan is not None and plan.loss_scale_rule is not None:
        raise Error(
            f"{begin} {first.why_at_once}. Automatic loss scaling looks at all gradients at the "
            "end of an iteration. Do that in front of step(), or set the loss scale by the "
            "optimizer's loss_scaling."
        )
    times = Counter(name for step in steps for name in step.parameters)
    times.update(traced.gradients)
    name, most = times.most_common(1)[0]
    if captures and most > 1:
        raise Error(
            f"OutfeedOptimizer: the iteration has {most} gradients of '{name}', one for each "
            "step(), and an element of its queue has room for one. Enqueue parameter.grad in the "
            "body instead."
        )
