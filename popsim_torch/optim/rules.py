"""Makes the update op of one parameter from the values of an optimizer.

Names and formulas of the scalars are those of PopART's optimizer tensors, because programs read and
anchor them. ``lr``, ``dp`` (dampening), ``wd`` (weight decay), ``mm`` (momentum), ``ls`` (loss
scaling) and ``vs`` (velocity scaling) stand for the values of the parameter's group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch

from popsim_torch.errors import Error
from popsim_torch.ir import names
from popsim_torch.optim.plan import (
    Accumulation,
    AttributeValue,
    GradientInput,
    HyperParameter,
    ParameterUpdate,
    Scalar,
    State,
    Term,
)

__all__ = [
    "AccumulationMode",
    "Rule",
    "Target",
    "gradient_scaling",
    "separate_accumulation",
    "update_rule",
]


@dataclasses.dataclass(frozen=True)
class Rule:
    """The structure of an optimizer, the same for all parameters.

    Attributes:
        type_name: ``SGD1``, ``SGD2``, ``ADAM``, ``ADAMW``, ``LAMB`` or ``RMSPROP``; or the name of
            the class whose step is traced.
        accum_type: The dtype of ``Accum___w``; None for the weight's.
        velocity_accum_type: The dtype of ``Accl___w``; None for the weight's.
        first_type: The dtype of ``Accl1___w``, and RMSprop's ``Accl3___w``.
        second_type: The dtype of Adam's and LAMB's ``Accl2___w``.
        max_grad_norm: The largest global gradient norm; None: no clipping.
        bias_correction: LAMB: divide the moments by ``1 - beta ** step``; Adam always does.
        centered: RMSprop: subtract the squared mean of the gradients.
        tf_variant: RMSprop as defined by TensorFlow.
        traced: Whether the optimizer's own step is traced.
        counts: RMSprop: count updates, as ``torch.optim.RMSprop`` does.
    """

    type_name: str
    accum_type: torch.dtype | None = torch.float32
    velocity_accum_type: torch.dtype | None = torch.float32
    first_type: torch.dtype = torch.float32
    second_type: torch.dtype = torch.float32
    max_grad_norm: float | None = None
    bias_correction: bool = True
    centered: bool = False
    tf_variant: bool = False
    traced: bool = False
    counts: bool = False

    @property
    def combined(self) -> bool:
        """Whether one tensor is both accumulator and velocity."""
        return self.type_name == "SGD1"


@dataclasses.dataclass(frozen=True)
class AccumulationMode:
    """The number of gradients that an update combines, and how it does so.

    Attributes:
        steps: The number of micro-batches per weight update, in each replica.
        mean: Whether to average the gradients; otherwise they are added up.
        running: With ``mean``: accumulators hold the mean so far, instead of a sum.
        replicas: The number of replicas whose accumulators are added up before the update.
    """

    steps: int = 1
    mean: bool = True
    running: bool = False
    replicas: int = 1

    @property
    def needed(self) -> bool:
        """Whether more than one gradient is combined."""
        return self.steps * self.replicas > 1

    @property
    def divisor(self) -> int:
        """The divisor of the accumulated gradient in the update (``af * rf``)."""
        if not self.mean:
            return 1
        return self.replicas if self.running else self.steps * self.replicas


@dataclasses.dataclass(frozen=True)
class Target:
    """The parameter of an update.

    Attributes:
        name: Canonical name.
        dtype: The dtype on the device.
        values: Hyper-parameters of its group, including ``loss_scaling``, by attribute name.
        in_group: False if it has the optimizer's defaults.
        accumulator_dtype: The dtype of its accumulator; None for the choice of the rule.
    """

    name: str
    dtype: torch.dtype
    values: Mapping[str, HyperParameter]
    in_group: bool
    accumulator_dtype: torch.dtype | None = None

    def state(
        self,
        kind: str,
        dtype: torch.dtype | None,
        *,
        initial: float = 0.0,
        initial_per_weight: float = 0.0,
        scale: float = 1.0,
    ) -> State:
        """Make a state with the shape of this parameter; with dtype None also its dtype.

        Raises:
            Error: The state of a complex parameter would have half precision.
        """
        if self.dtype.is_complex:
            if dtype == torch.float16:
                raise Error(
                    f"The optimizer or the options ask for a state of {dtype} for the parameter "
                    f"'{self.name}', which is complex; the device has no complex numbers of half "
                    "precision. Ask for torch.float32: the state is torch.complex64 then."
                )
            dtype = self.dtype
        return State(
            names.state(kind, self.name),
            kind,
            dtype or self.dtype,
            initial=initial,
            initial_per_weight=initial_per_weight,
            scale=scale,
        )

    def scalar(
        self,
        prefix: str,
        formula: Callable[..., float],
        *ingredients: str,
        gradient_scale: int = 0,
    ) -> Scalar:
        """Make the scalar ``prefix``: ``formula`` of the values with the names ``ingredients``.

        ``gradient_scale`` is passed to ``Scalar``.
        """
        values = [self.values[ingredient] for ingredient in ingredients]
        follows_weight = prefix.startswith(("weightDecayScaleFactor", "scaledMomentum", "sgdMom"))
        half = follows_weight and self.dtype == torch.float16
        if self.in_group:
            name = names.specific_hyper_parameter(prefix, self.name)
        else:
            name = names.default_hyper_parameter(prefix, "float16" if half else "float32")
        return Scalar(
            name,
            float(formula(*(value.value for value in values))),
            all(value.constant for value in values),
            gradient_scale=gradient_scale,
            shown_dtype=torch.float16 if half else torch.float32,
        )


def update_rule(rule: Rule, target: Target, mode: AccumulationMode) -> ParameterUpdate:
    """Return the update of one parameter.

    Args:
        rule: Structure of the optimizer.
        target: The parameter and its values.
        mode: How gradients are combined. ``running`` has no meaning for a combined velocity.
    """
    if rule.combined:
        mode = dataclasses.replace(mode, running=False)
    match rule.type_name:
        case "SGD1" | "SGD2":
            momentum = target.values["momentum"]
            if momentum.constant and momentum.value == 0:
                return _plain_sgd(rule, target, mode)
            if rule.combined:
                return _combined_sgd(rule, target, mode)
            return _momentum_sgd(rule, target, mode)
        case "ADAM" | "ADAMW" | "LAMB":
            return _adam(rule, target, mode)
        case "RMSPROP":
            return _rmsprop(rule, target, mode)
    raise ValueError(f"no update rule for optimizers of type {rule.type_name}")


def _clip_attributes(rule: Rule) -> dict[str, AttributeValue]:
    return {} if rule.max_grad_norm is None else {"max_grad_norm": float(rule.max_grad_norm)}


def separate_accumulation(
    rule: Rule, target: Target, mode: AccumulationMode
) -> tuple[GradientInput, tuple[Accumulation, ...]]:
    """Return the source of the update's gradient, and the ops that accumulate it there."""
    if not mode.needed:
        return GradientInput.GRADIENT, ()
    state = target.state("Accum", target.accumulator_dtype or rule.accum_type)
    running = mode.running and mode.mean
    accumulation = Accumulation(
        "accumulate", state, names.updated(state.name), attributes={"running": running}
    )
    return GradientInput.ACCUMULATOR, (accumulation,)


def _plain_sgd(rule: Rule, target: Target, mode: AccumulationMode) -> ParameterUpdate:
    """``w = w * (1 - lr*(1-dp)*wd) - lr*(1-dp)*g/den``."""
    gradient, accumulations = separate_accumulation(rule, target, mode)
    decay = target.scalar(
        "weightDecayScaleFactor0",
        lambda lr, dp, wd: 1 - lr * (1 - dp) * wd,
        *("lr", "dampening", "weight_decay"),
    )
    rate = target.scalar(
        "scaledLearningRate0",
        lambda lr, dp, ls: lr * (1 - dp) / (ls * mode.divisor),
        *("lr", "dampening", "loss_scaling"),
        gradient_scale=-1,
    )
    return ParameterUpdate(
        target.name,
        "sgd_update",
        gradient,
        states=(),
        scalars=(decay, rate),
        attributes=_clip_attributes(rule),
        accumulations=accumulations,
        clipped=rule.max_grad_norm is not None,
    )


def _momentum_sgd(rule: Rule, target: Target, mode: AccumulationMode) -> ParameterUpdate:
    """``v = mm*v + (1-dp)*(g/den + wd*w)``, ``w -= lr*v``; the velocity is stored times ``ls``."""
    gradient, accumulations = separate_accumulation(rule, target, mode)
    nesterov = bool(target.values["nesterov"].value)
    scalars = [
        target.scalar("scaledMomentum2", lambda mm: mm, "momentum"),
        target.scalar(
            "dampeningScaleFactor2",
            lambda dp, _ls: (1 - dp) / mode.divisor,  # the velocity's scale cancels the gradient's
            *("dampening", "loss_scaling"),
            gradient_scale=-1,
        ),
        target.scalar(
            "scaledWeightDecay1",
            lambda dp, wd, ls: (1 - dp) * wd * ls,
            *("dampening", "weight_decay", "loss_scaling"),
        ),
        target.scalar("scaledLearningRate2", lambda lr, ls: lr / ls, "lr", "loss_scaling"),
    ]
    if nesterov:
        scalars += _nesterov_scalars(target, 2, "loss_scaling", mode.divisor)
    loss_scaling = target.values["loss_scaling"].value
    return ParameterUpdate(
        target.name,
        "sgd_momentum_update",
        gradient,
        states=(target.state("Accl", rule.velocity_accum_type, scale=loss_scaling),),
        scalars=tuple(scalars),
        attributes={"nesterov": nesterov, **_clip_attributes(rule)},
        accumulations=accumulations,
        clipped=rule.max_grad_norm is not None,
        terms=_nesterov_terms(target) if nesterov else (),
    )


def _nesterov_scalars(
    target: Target, version: int, velocity_scale: str, divisor: int
) -> list[Scalar]:
    """Return the factors of the step ``scale * (g/den + wd*w) + mm*v``.

    Args:
        target: The parameter.
        version: 1 for combined SGD, 2 for separate velocity.
        velocity_scale: Name of the value that stored velocities are multiplied by.
        divisor: ``af``.

    Source:
        The names are PopART's; the assignment of factors to names is specific to this package.
    """
    return [
        target.scalar(f"nesterovGradScaleFactor{version}", lambda s: s, velocity_scale),
        target.scalar(
            f"nesterovDampeningScaleFactor{version}",
            lambda ls: 1 / (ls * divisor),
            "loss_scaling",
            gradient_scale=-1,
        ),
        target.scalar("sgdMomentum", lambda mm: mm, "momentum"),
        target.scalar("sgdWeightDecay", lambda wd: wd, "weight_decay"),
    ]


def _nesterov_terms(target: Target) -> tuple[Term, ...]:
    """Return the true gradient, and the step before the learning rate."""
    return (
        Term(names.unscaled_gradient(target.name)),
        Term(names.nesterov_gradient(target.name)),
    )


def _combined_sgd(rule: Rule, target: Target, mode: AccumulationMode) -> ParameterUpdate:
    """Return SGD whose velocity is also the accumulator.

    Clipping, Nesterov momentum and replicas need the whole gradient separately. With them it has
    its own accumulator, and the update op adds it to the velocity.
    """
    nesterov = bool(target.values["nesterov"].value)
    separate = nesterov or rule.max_grad_norm is not None or mode.replicas > 1
    weight_decay = target.scalar(
        "scaledWeightDecay1",
        lambda dp, wd, vs: (1 - dp) * wd * vs,
        *("dampening", "weight_decay", "velocity_scaling"),
    )
    velocity = target.state(
        "Accl",
        None,
        initial_per_weight=weight_decay.value,
        scale=target.values["velocity_scaling"].value,
    )
    dampening = target.scalar(
        "dampeningScaleFactor1",
        lambda dp, vs, ls: (1 - dp) * vs / (ls * mode.divisor),
        *("dampening", "velocity_scaling", "loss_scaling"),
        gradient_scale=-1,
    )
    scalars = [
        target.scalar("scaledMomentum1", lambda mm: mm, "momentum"),
        weight_decay,
        target.scalar("scaledLearningRate1", lambda lr, vs: lr / vs, "lr", "velocity_scaling"),
    ]
    if separate:
        gradient, accumulations = separate_accumulation(rule, target, mode)
        scalars.append(dampening)
        if nesterov:
            scalars += _nesterov_scalars(target, 1, "velocity_scaling", mode.divisor)
    else:
        gradient = GradientInput.NONE
        accumulations = (
            Accumulation(
                "sgd_combined_accumulate",
                velocity,
                names.velocity_before_update(target.name),
                (dampening,),
            ),
        )
    return ParameterUpdate(
        target.name,
        "sgd_combined_update",
        gradient,
        states=(velocity,),
        scalars=tuple(scalars),
        attributes={
            "nesterov": nesterov,
            **_clip_attributes(rule),
        },
        accumulations=accumulations,
        clipped=rule.max_grad_norm is not None,
        terms=(
            Term(names.velocity_into_update(target.name)),
            *(_nesterov_terms(target) if nesterov else ()),
        ),
    )


def gradient_scaling(target: Target, prefix: str, mode: AccumulationMode) -> Scalar:
    """Return the scalar that an accumulated gradient is divided by."""
    return target.scalar(prefix, lambda ls: ls * mode.divisor, "loss_scaling", gradient_scale=1)


def _adam(rule: Rule, target: Target, mode: AccumulationMode) -> ParameterUpdate:
    """Return Adam, AdamW (decoupled weight decay) or LAMB."""
    gradient, accumulations = separate_accumulation(rule, target, mode)
    lamb = rule.type_name == "LAMB"
    states = [
        target.state("Accl1", rule.first_type),
        target.state("Accl2", rule.second_type),
    ]
    if rule.bias_correction:
        states.append(_counter(target))
    scalars = [
        target.scalar("learningRate", lambda lr: lr, "lr"),
        target.scalar("weightDecay", lambda wd: wd, "weight_decay"),
        target.scalar("adamBeta1", lambda beta: beta, "beta1"),
        target.scalar("adamBeta2", lambda beta: beta, "beta2"),
        target.scalar("adamEps", lambda eps: eps, "eps"),
        gradient_scaling(target, "adamGradientScaling", mode),
    ]
    attributes: dict[str, AttributeValue] = {"bias_correction": rule.bias_correction}
    terms = [Term(names.update_term("AdamUpdater", target.name))]
    if lamb:
        terms += [
            Term(names.update_term(kind, target.name), per_element=False)
            for kind in ("LambR1Sq", "LambR2Sq")
        ]
        scalars.append(target.scalar("maxWeightNorm", lambda norm: norm, "max_weight_norm"))
    else:
        attributes["decoupled_weight_decay"] = rule.type_name == "ADAMW"
        attributes |= _clip_attributes(rule)
    return ParameterUpdate(
        target.name,
        "lamb_update" if lamb else "adam_update",
        gradient,
        states=tuple(states),
        scalars=tuple(scalars),
        attributes=attributes,
        accumulations=accumulations,
        clipped=not lamb and rule.max_grad_norm is not None,
        terms=tuple(terms),
    )


def _rmsprop(rule: Rule, target: Target, mode: AccumulationMode) -> ParameterUpdate:
    """Return RMSprop; a constant momentum of 0 needs no buffer."""
    gradient, accumulations = separate_accumulation(rule, target, mode)
    momentum = target.values["momentum"]
    has_momentum = not (momentum.constant and momentum.value == 0)
    states = [target.state("Accl1", rule.first_type, initial=1.0 if rule.tf_variant else 0.0)]
    if has_momentum:
        states.append(target.state("Accl2", torch.float32))
    if rule.centered:
        states.append(target.state("Accl3", rule.first_type))
    return ParameterUpdate(
        target.name,
        "rmsprop_update",
        gradient,
        states=tuple(states),
        scalars=(
            target.scalar("learningRate", lambda lr: lr, "lr"),
            target.scalar("weightDecay", lambda wd: wd, "weight_decay"),
            target.scalar("adaptiveAlpha", lambda alpha: alpha, "alpha"),
            target.scalar("adaptiveMomentum", lambda mm: mm, "momentum"),
            target.scalar("adaptiveEps", lambda eps: eps, "eps"),
            gradient_scaling(target, "adaptiveGradientScaling", mode),
        ),
        attributes={
            "momentum": has_momentum,
            "centered": rule.centered,
            "tf_variant": rule.tf_variant,
        },
        accumulations=accumulations,
        terms=(Term(names.update_term("AdaptiveUpdater", target.name)),),
        counter=_counter(target) if rule.counts else None,
    )


def _counter(target: Target) -> State:
    """Return the state that counts updates."""
    return State(names.state("Step", target.name), "Step", torch.float32, per_element=False)
