"""PopTorch's optimizers: those of torch, with additional settings for a device.

A hyper-parameter that is given explicitly to a constructor is a *variable*: it can be changed after
compilation, through ``trainingModel.setOptimizer``. A hyper-parameter that is left out (None) has
PyTorch's default and is *constant*, part of the compiled program. Plain ``torch.optim`` optimizers
work, too; for them the values determine which hyper-parameters are constant.

    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, loss_scaling=128.0)
    optimizer.variable_attrs.isConstant("momentum")  # True
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
from torch.optim.optimizer import ParamsT

from popsim_torch.errors import Error, UsageValueError
from popsim_torch.optim.base import (
    AccumulationType,
    DeviceLink,
    Optimizer,
    VariableAttributes,
    accumulation_type,
)

__all__ = [
    "LAMB",
    "SGD",
    "Adam",
    "AdamW",
    "DeviceLink",
    "Optimizer",
    "RMSprop",
    "VariableAttributes",
]

_logger = logging.getLogger("poptorch::python")

_MAX_WEIGHT_NORM = 65500.0


def _given(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that are not None."""
    return {name: value for name, value in arguments.items() if value is not None}


def _norm_limit(max_grad_norm: float | None) -> float:
    """Return the largest gradient norm, infinity for None."""
    if max_grad_norm is None:
        return math.inf
    if math.isnan(max_grad_norm) or max_grad_norm < 0:
        raise Error(f"max_grad_norm must be a number of at least 0, got {max_grad_norm}.")
    return float(max_grad_norm)


def _check_not_amsgrad(amsgrad: bool | None) -> None:
    if amsgrad:
        raise UsageValueError("Only non-amsgrad Adam/AdamW optimizers are supported.")


class SGD(Optimizer, torch.optim.SGD):
    """Stochastic gradient descent.

    Dampening applies from the first step on, also without momentum.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        momentum: Factor of the velocity. None means 0, without a velocity. An explicit 0.0 keeps a
            velocity, so the momentum can be raised later.
        dampening: Share of the gradient that is not added to the velocity.
        weight_decay: L2 penalty.
        nesterov: Use Nesterov momentum.
        maximize: As in torch; ignored on the device.
        foreach: As in torch; ignored on the device.
        differentiable: As in torch; ignored on the device.
        loss_scaling: Multiplies the loss before the backward pass.
        velocity_scaling: Multiplies stored velocities, only with ``use_combined_accum``.
        use_combined_accum: Use one tensor per parameter as gradient accumulator and velocity.
        accum_type: Dtype of gradient accumulators; ignored with ``use_combined_accum``.
        velocity_accum_type: Dtype of velocities; ignored with ``use_combined_accum``.
        max_grad_norm: The largest global norm of the gradients; None: no clipping.

    Raises:
        AssertionError: A dtype is neither float16 nor float32.
        ValueError: torch does not accept a value.
        Error: ``max_grad_norm`` is NaN or negative.
    """

    accum_type = AccumulationType("The type that gradients are accumulated in")
    velocity_accum_type = AccumulationType("The type of the velocities (momentum)")

    def __init__(
        self,
        params: ParamsT,
        lr: float | None,
        momentum: float | None = None,
        dampening: float | None = None,
        weight_decay: float | None = None,
        nesterov: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        velocity_scaling: float | None = None,
        use_combined_accum: bool | None = None,
        accum_type: torch.dtype | None = None,
        velocity_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        variable = _given(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay)
        flags = _given(
            nesterov=nesterov, maximize=maximize, foreach=foreach, differentiable=differentiable
        )
        super().__init__(params, **variable, **flags)
        self.use_combined_accum = bool(use_combined_accum)
        if self.use_combined_accum:
            if velocity_scaling is not None:
                variable["velocity_scaling"] = velocity_scaling
            self.defaults["velocity_scaling"] = variable.get("velocity_scaling", 1.0)
            for group in self.param_groups:
                group.setdefault("velocity_scaling", self.defaults["velocity_scaling"])
        elif velocity_scaling is not None:
            _logger.warning(
                "poptorch.optim.SGD: velocity_scaling is ignored; it applies only with "
                "use_combined_accum=True."
            )
        self.accum_type = accumulation_type("accum_type", accum_type)
        self.velocity_accum_type = accumulation_type("velocity_accum_type", velocity_accum_type)
        self.max_grad_norm = _norm_limit(max_grad_norm)
        self._set_common(variable, loss_scaling)


class _MomentOptimizer(Optimizer):
    """An optimizer that keeps averages of the gradient and of its square.

    Attributes:
        accum_type: Dtype of gradient accumulators.
        first_order_momentum_accum_type: Dtype of the averages of the gradient.
        second_order_momentum_accum_type: Dtype of the averages of its square.
    """

    accum_type = AccumulationType("The type that gradients are accumulated in")
    first_order_momentum_accum_type = AccumulationType("The type of the first moments")
    second_order_momentum_accum_type = AccumulationType("The type of the second moments")

    def _set_types(
        self, accum: torch.dtype | None, first: torch.dtype | None, second: torch.dtype | None
    ) -> None:
        self.accum_type = accumulation_type("accum_type", accum)
        self.first_order_momentum_accum_type = accumulation_type(
            "first_order_momentum_accum_type", first
        )
        self.second_order_momentum_accum_type = accumulation_type(
            "second_order_momentum_accum_type", second
        )


class Adam(_MomentOptimizer, torch.optim.Adam):
    """Adam.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        betas: Decay of the averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: L2 penalty.
        amsgrad: Must be False or None.
        foreach: As in torch; ignored on the device.
        maximize: As in torch; ignored on the device.
        capturable: As in torch; ignored on the device.
        differentiable: As in torch; ignored on the device.
        fused: As in torch; ignored on the device.
        loss_scaling: Multiplies the loss before the backward pass.
        accum_type: Dtype of gradient accumulators.
        first_order_momentum_accum_type: Dtype of the averages of the gradient.
        second_order_momentum_accum_type: Dtype of the averages of its square.
        max_grad_norm: The largest global norm of the gradients; None: no clipping.

    Raises:
        AssertionError: A dtype is neither float16 nor float32.
        ValueError: ``amsgrad`` is True, or torch does not accept a value.
        Error: ``max_grad_norm`` is NaN or negative.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        _check_not_amsgrad(amsgrad)
        variable = _given(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        flags = _given(
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        super().__init__(params, **variable, **flags)
        self._set_types(
            accum_type, first_order_momentum_accum_type, second_order_momentum_accum_type
        )
        self.max_grad_norm = _norm_limit(max_grad_norm)
        self._set_common(variable, loss_scaling)


class AdamW(_MomentOptimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        betas: Decay of the averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Share of the weight, times ``lr``, that each update subtracts.
        amsgrad: Must be False or None.
        maximize: As in torch; ignored on the device.
        foreach: As in torch; ignored on the device.
        capturable: As in torch; ignored on the device.
        differentiable: As in torch; ignored on the device.
        fused: As in torch; ignored on the device.
        loss_scaling: Multiplies the loss before the backward pass.
        bias_correction: No effect, as in PopTorch: the averages are always divided by ``1 - beta **
            step``, on the device and in ``step()`` on the host.
        accum_type: Dtype of gradient accumulators.
        first_order_momentum_accum_type: Dtype of the averages of the gradient.
        second_order_momentum_accum_type: Dtype of the averages of its square.
        max_grad_norm: The largest global norm of the gradients; None: no clipping.

    Raises:
        AssertionError: A dtype is neither float16 nor float32.
        ValueError: ``amsgrad`` is True, or torch does not accept a value.
        Error: ``max_grad_norm`` is NaN or negative.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        bias_correction: bool | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        _check_not_amsgrad(amsgrad)
        variable = _given(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        flags = _given(
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        super().__init__(params, **variable, **flags)
        self.bias_correction = bias_correction is None or bool(bias_correction)
        self._set_types(
            accum_type, first_order_momentum_accum_type, second_order_momentum_accum_type
        )
        self.max_grad_norm = _norm_limit(max_grad_norm)
        self._set_common(variable, loss_scaling)


class RMSprop(_MomentOptimizer, torch.optim.RMSprop):
    """RMSprop.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        alpha: Decay of the average of the squared gradient.
        eps: Added to the denominator.
        weight_decay: L2 penalty.
        momentum: Factor of the momentum buffer. None means 0, without a buffer.
        centered: Divide by an estimate of the variance instead of the mean square.
        foreach: As in torch; ignored on the device.
        maximize: As in torch; ignored on the device.
        differentiable: As in torch; ignored on the device.
        loss_scaling: Multiplies the loss before the backward pass.
        accum_type: Dtype of gradient accumulators.
        first_order_momentum_accum_type: Dtype of the averages.
        second_order_momentum_accum_type: Ignored.
        use_tf_variant: Whether to compute as TensorFlow does: ``eps`` inside of the square root,
            and averages that start at 1.

    Raises:
        AssertionError: A dtype is neither float16 nor float32.
        ValueError: torch does not accept a value.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        alpha: float | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        momentum: float | None = None,
        centered: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        use_tf_variant: bool | None = None,
    ) -> None:
        variable = _given(lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum)
        flags = _given(
            centered=centered, foreach=foreach, maximize=maximize, differentiable=differentiable
        )
        super().__init__(params, **variable, **flags)
        self._set_types(
            accum_type, first_order_momentum_accum_type, second_order_momentum_accum_type
        )
        self.use_tf_variant = bool(use_tf_variant)
        self._set_common(variable, loss_scaling)


class LAMB(_MomentOptimizer):
    """Adam with steps that are scaled to the norm of each weight.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        betas: Decay of the averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.
        bias_correction: Whether to divide the averages by ``1 - beta ** step``; None means True.
        loss_scaling: Multiplies the loss before the backward pass.
        max_weight_norm: The largest weight norm for the scaling; larger norms are replaced by it. 0
            means no scaling.
        accum_type: Dtype of gradient accumulators.
        first_order_momentum_accum_type: Dtype of the averages of the gradient.
        second_order_momentum_accum_type: Dtype of the averages of its square.

    Raises:
        AssertionError: A dtype is neither float16 nor float32.
        ValueError: A value is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        bias_correction: bool | None = None,
        loss_scaling: float | None = None,
        max_weight_norm: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
    ) -> None:
        variable = _given(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            max_weight_norm=max_weight_norm,
        )
        defaults = {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 1e-2,
            "max_weight_norm": _MAX_WEIGHT_NORM,
            **variable,
        }
        _check_lamb_values(defaults)
        super().__init__(params, defaults)
        self.bias_correction = bias_correction is None or bool(bias_correction)
        self.max_weight_norm = float(defaults["max_weight_norm"])
        self._set_types(
            accum_type, first_order_momentum_accum_type, second_order_momentum_accum_type
        )
        self._set_common(variable, loss_scaling)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters on the CPU, from their ``grad``.

        Args:
            closure: Computes the loss and the gradients again.

        Returns:
            The closure's loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)
        return loss

    def _step_one(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: Mapping[str, Any]
    ) -> None:
        state = self.state[parameter]
        wide = torch.complex64 if parameter.is_complex() else torch.float32
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(gradient, dtype=wide)
            state["exp_avg_sq"] = torch.zeros_like(gradient, dtype=wide)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        first, second = state["exp_avg"], state["exp_avg_sq"]
        gradient = gradient.to(wide).resolve_conj()
        if parameter.is_complex():  # as pairs of numbers
            gradient, first, second, parameter = map(
                torch.view_as_real, (gradient, first, second, parameter.detach())
            )
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if self.bias_correction:
            first = first / (1 - beta1 ** state["step"])
            second = second / (1 - beta2 ** state["step"])
        weight = parameter.float()
        term = first / (second.sqrt() + group["eps"]) + group["weight_decay"] * weight
        weight_norm = weight.norm().clamp(max=self.max_weight_norm)
        term_norm = term.norm()
        ratio = torch.where((weight_norm > 0) & (term_norm > 0), weight_norm / term_norm, 1.0)
        parameter.copy_(weight - group["lr"] * ratio * term)


def _check_lamb_values(values: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for values that torch's Adam would not accept either."""
    for name in ("lr", "eps", "weight_decay", "max_weight_norm"):
        if not values[name] >= 0.0:
            raise UsageValueError(f"Invalid {name} value: {values[name]}. It must not be negative.")
    for index, beta in enumerate(values["betas"]):
        if not 0.0 <= beta < 1.0:
            raise UsageValueError(
                f"Invalid beta parameter at index {index}: {beta}. It must be in [0, 1)."
            )
