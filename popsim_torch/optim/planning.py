"""Makes the plan of a model's weight update from an optimizer object.

    settings = read_optimizer(optimizer)  # when the model is wrapped, and by setOptimizer
    plan = plan_updates(settings, parameters, ...)  # when it is compiled, and by setOptimizer

There are two steps, because a model uses the optimizer's values from the time when it is wrapped,
not from when it is compiled. ``settings`` does the first step, ``plan`` defines a plan and how it
becomes ir, and ``rules`` has the formulas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from popsim_torch import logs
from popsim_torch.dtypes import held_dtype
from popsim_torch.enums import ReductionType
from popsim_torch.errors import Error, InternalError
from popsim_torch.ir import names
from popsim_torch.optim.description import describe
from popsim_torch.optim.loss_scale import LossScaleRule
from popsim_torch.optim.plan import (
    Accumulation,
    AttributeValue,
    GradientInput,
    HyperParameter,
    OptimizerPlan,
    ParameterUpdate,
    Scalar,
    State,
)
from popsim_torch.optim.rules import AccumulationMode, Rule, Target, update_rule
from popsim_torch.optim.settings import (
    AttributeRecord,
    GroupSettings,
    OptimizerSettings,
    read_optimizer,
)

TraceUpdates = Callable[
    [OptimizerSettings, Sequence[tuple[Target, torch.Tensor]], AccumulationMode],
    Sequence[ParameterUpdate],
]
"""Makes the updates of an optimizer for some parameters by tracing its step."""

__all__ = [
    "Accumulation",
    "AttributeRecord",
    "AttributeValue",
    "GradientInput",
    "GroupSettings",
    "HyperParameter",
    "OptimizerPlan",
    "OptimizerSettings",
    "ParameterUpdate",
    "Scalar",
    "State",
    "join_plans",
    "plan_updates",
    "read_optimizer",
]


def join_plans(plans: Sequence[OptimizerPlan], loss_scale: str) -> OptimizerPlan:
    """Return one plan with the updates of several optimizers, which share no parameter.

    Args:
        plans: One plan for each optimizer; empty for gradients that update nothing.
        loss_scale: The name of the loss scale's tensor.

    Raises:
        Error: The optimizers cannot update weights in one program.
    """
    if len(plans) == 1:
        return plans[0]
    if not plans:
        scale = Scalar(loss_scale, 1.0, constant=True)
        return OptimizerPlan("none", (), scale, None, {}, (), {}, (), {})
    first = plans[0]
    for plan in plans:
        if plan.loss_scaling != first.loss_scaling or plan.loss_scale_rule is not None:
            raise Error(
                "The loop steps several optimizers whose loss scaling differs, or adapts itself: "
                "all gradients of a program have one loss scale. Give all the same loss_scaling."
            )
        if plan.max_grad_norm is not None:
            raise Error(
                "The loop steps several optimizers, and one of them clips gradients "
                "(max_grad_norm). Clip with torch.nn.utils.clip_grad_norm_ in the body."
            )
    return dataclasses.replace(
        first,
        type_name="+".join(plan.type_name for plan in plans),
        updates=tuple(update for plan in plans for update in plan.updates),
        groups=tuple(group for plan in plans for group in plan.groups),
        group_values=tuple(values for plan in plans for values in plan.group_values),
        modes={
            f"{position}: {name}": mode
            for position, plan in enumerate(plans)
            for name, mode in plan.modes.items()
        },
        description=tuple(line for plan in plans for line in plan.description),
    )


def plan_updates(
    optimizer: torch.optim.Optimizer | OptimizerSettings,
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    gradient_accumulation: int = 1,
    replicas: int = 1,
    replicas_here: int = 1,
    reduction: ReductionType = ReductionType.Mean,
    running_mean: bool = False,
    relax_checks: bool = False,
    accumulator_dtype: Callable[[torch.nn.Parameter], torch.dtype | None] | None = None,
    all_parameters: Mapping[str, torch.nn.Parameter] | None = None,
    loss_scale: str = names.LOSS_SCALE,
    loss_scale_rule: LossScaleRule | None = None,
    trace: TraceUpdates | None = None,
) -> OptimizerPlan:
    """Plan the weight update of a traced model.

    A parameter that is in no group of the optimizer is trained with the optimizer's ``defaults``. A
    parameter of the optimizer that is not in ``parameters`` (frozen, or without influence on the
    loss) is not updated.

    Args:
        optimizer: An optimizer, or the result of ``read_optimizer`` for one.
        parameters: The parameters that have a gradient, by canonical name; the optimizer's groups
            are found by the identity of these objects.
        gradient_accumulation: Micro-batches per weight update, in each replica.
        replicas: Replicas that train together, in all processes.
        replicas_here: Those of one process.
        reduction: Sum or mean over the micro-batches of all replicas.
        running_mean: Whether accumulators hold the mean so far (strategy Running); only with Mean.
        relax_checks: As in ``read_optimizer``.
        accumulator_dtype: The dtype of each parameter's accumulator; None, for all or for one,
            means the choice of the optimizer.
        all_parameters: Every parameter of the model by canonical name, also those without a
            gradient; None to skip the check that the optimizer's parameters belong to the model.
        loss_scale: The name of the loss scale's tensor.
        loss_scale_rule: How the device adapts the loss scale by itself, if it does.
        trace: Makes the updates of an optimizer whose own step is traced.

    Raises:
        AssertionError: The optimizer cannot be converted.
        Error: Its step cannot be traced, a value is out of range, or a parameter of the optimizer
            is not in the model.
    """
    if isinstance(optimizer, OptimizerSettings):
        settings = optimizer
    else:
        settings = read_optimizer(optimizer, relax_checks=relax_checks)
    rule = settings.rule
    mean = reduction == ReductionType.Mean
    mode = AccumulationMode(
        gradient_accumulation, mean, running_mean and mean and not rule.combined, replicas
    )
    _check_range(settings)
    known = {**(all_parameters or {}), **parameters}
    if all_parameters is not None:
        _check_in_model(settings, known)
    group_of = {
        id(parameter): index
        for index, group in enumerate(settings.groups)
        for parameter in group.parameters
    }
    targets: list[tuple[Target, torch.Tensor]] = []
    left_out: list[str] = []
    for name, parameter in parameters.items():
        group_index = group_of.get(id(parameter))
        in_group = group_index is not None
        if not in_group and not settings.trains_all:
            left_out.append(name)  # as eager PyTorch leaves it
            continue
        values = settings.defaults if group_index is None else settings.groups[group_index].values
        values = {**values, "loss_scaling": settings.loss_scaling}
        accumulated = None
        if accumulator_dtype is not None and mode.needed:
            accumulated = accumulator_dtype(parameter)
            _check_has_accumulator(rule, accumulated)
        target = Target(name, held_dtype(parameter.dtype), values, in_group, accumulated)
        targets.append((target, parameter))
    if left_out:
        logs.python.warning(
            "The optimizer does not update these parameters, which are in none of its groups: %s",
            ", ".join(left_out),
        )
    updates: Sequence[ParameterUpdate]
    if rule.traced:
        if trace is None:
            raise InternalError(f"nothing traces the step of {rule.type_name}")
        updates = trace(settings, targets, mode)
    else:
        updates = [update_rule(rule, target, mode) for target, _ in targets]
    groups = _group_names(settings, known)
    return OptimizerPlan(
        type_name=rule.type_name,
        updates=tuple(updates),
        loss_scaling=Scalar(
            loss_scale,
            settings.loss_scaling.value,
            settings.loss_scaling.constant,
            gradient_scale=1,
        ),
        max_grad_norm=rule.max_grad_norm,
        norm_attributes={"divisor": float(mode.divisor)},
        groups=groups,
        defaults=settings.defaults,
        group_values=tuple(group.values for group in settings.groups),
        modes=_modes(rule, updates),
        loss_scale_rule=loss_scale_rule,
        replicas=replicas,
        replicas_here=replicas_here,
        description=tuple(describe(settings, groups)),
    )


def _check_has_accumulator(rule: Rule, dtype: torch.dtype | None) -> None:
    if rule.combined and dtype is not None:
        raise Error(
            f"The options ask for gradients to be accumulated in {dtype}, but SGD with "
            "use_combined_accum adds them to its velocities, which are float32 or have the "
            "weights' dtype. Leave out use_combined_accum, or the dtype "
            "(Options.Training.gradientAccumulationDtype, gradient_accumulation_dtype)."
        )


def _group_names(
    settings: OptimizerSettings, known: Mapping[str, torch.nn.Parameter]
) -> tuple[tuple[str, ...], ...]:
    """Return the names of each group's parameters, without unknown parameters."""
    name_of = {id(parameter): name for name, parameter in list(known.items())[::-1]}
    return tuple(
        tuple(name_of[id(p)] for p in group.parameters if id(p) in name_of)
        for group in settings.groups
    )


def _check_in_model(settings: OptimizerSettings, known: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise ``Error`` for a parameter of the optimizer that the model does not have."""
    in_model = {id(parameter) for parameter in known.values()}
    for index, group in enumerate(settings.groups):
        for position, parameter in enumerate(group.parameters):
            if id(parameter) not in in_model:
                raise Error(
                    f"Parameter {position} of optimizer group {index}, of shape "
                    f"{list(parameter.shape)}, is not in the model. Make the optimizer from the "
                    "parameters of the wrapped model, and do not replace them after that."
                )


def _modes(rule: Rule, updates: Sequence[ParameterUpdate]) -> dict[str, object]:
    """Return the value of ``OptimizerPlan.modes``."""
    if rule.traced:
        return {
            "Optimizer types": rule.type_name,
            "Update rules": ",".join(str(update.attributes["rule"]) for update in updates),
        }
    match rule.type_name:
        case "SGD1" | "SGD2":
            return {
                "Optimizer types": "SGD",
                "SGD accumulator and velocity modes": "combined" if rule.combined else "separate",
                "SGD accumulation types": rule.accum_type,
                "SGD velocity accumulation types": rule.velocity_accum_type,
                "Maximum gradient norms": rule.max_grad_norm,
            }
        case "RMSPROP":
            return {
                "Optimizer types": "RMSprop",
                "Adaptive modes": "centered RMSprop" if rule.centered else "RMSprop",
            }
        case _:
            bias = "" if rule.bias_correction else " without bias correction"
            return {
                "Optimizer types": "Adam",
                "Adam modes": ("LAMB" if rule.type_name == "LAMB" else "Adam") + bias,
                "Weight decay modes": "L2" if rule.type_name == "ADAM" else "decoupled",
                "Maximum gradient norms": rule.max_grad_norm,
            }


def _check_range(settings: OptimizerSettings) -> None:
    """Raise ``Error`` for values that allow no update."""
    if settings.loss_scaling.value == 0:
        raise Error("Loss scaling cannot be 0.")
    if settings.rule.traced:
        return  # the optimizer itself checks what it needs
    least = ("velocity_scaling", "eps") if settings.trains_all else ("velocity_scaling",)
    _check_values(settings.defaults, "the defaults", least)
    for index, group in enumerate(settings.groups):
        _check_values(group.values, f"group {index}", least)


def _check_values(
    values: Mapping[str, HyperParameter], where: str, positive: Collection[str]
) -> None:
    """Raise ``Error`` for values that allow no update.

    Args:
        values: The values.
        where: Where they are.
        positive: Those that must not be 0. (PyTorch's optimizers, but not PopTorch's, allow an eps
            of 0.)
    """

    def refuse(name: str, rule: str) -> Error:
        return Error(f"Optimizer value '{name}' in {where} is {values[name].value}; {rule}.")

    for name, hyper in values.items():
        # The condition also refuses NaN.
        if name in positive:
            if not hyper.value > 0:
                raise refuse(name, "it must be greater than 0")
        elif not hyper.value >= 0:
            raise refuse(name, "it must not be negative")
        elif name in ("beta1", "beta2") and hyper.value >= 1:
            raise refuse(name, "it must be less than 1")
    if values["lr"].constant and values["lr"].value == 0:
        raise refuse("lr", "a constant learning rate must not be 0; pass it to the constructor")
    if "nesterov" in values and values["nesterov"].value and values["dampening"].value > 0:
        raise refuse("dampening", "Nesterov momentum needs a dampening of 0")
