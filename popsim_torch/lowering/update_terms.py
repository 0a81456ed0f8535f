"""Tensors inside of a weight update, which its op computes in passing and keeps nowhere.

A program has them only where they are anchored: ops of their own compute them in front of the
update, from what the update is about to read. The update's op stays as it is, so that looking
changes no bit and what nobody looks at costs nothing. They are float32, as all arithmetic of
updates is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from popsim_torch.ir import Phase, Tensor, names
from popsim_torch.ir.map_code import MapCode, MapValue
from popsim_torch.ir.offers import Offers
from popsim_torch.lowering.emit.builder import Builder, Place
from popsim_torch.lowering.emit.maps import emit_map
from popsim_torch.lowering.rules.reductions import reduce_all
from popsim_torch.optim.plan import GradientInput, ParameterUpdate


@dataclass(frozen=True)
class UpdateOperands:
    """What the update op of a parameter reads.

    Attributes:
        weight: The parameter.
        gradient: Of one micro-batch or of all; None where the velocity contains it.
        gradient_stage: Pipeline stage on which it is complete.
        states: By kind, ``Accl1`` or the like.
        scalars: Hyper-parameters by kind, ``adamBeta1`` or the like.
        norm: Global norm of the gradients, if they are clipped.
        phase: When the update's op runs.
    """

    weight: Tensor
    gradient: Tensor | None
    gradient_stage: int
    states: Mapping[str, Tensor]
    scalars: Mapping[str, Tensor]
    norm: Tensor | None
    phase: Phase = Phase.UPDATE


class UpdateTerms:
    """Offers the terms of weight updates.

    Args:
        builder: The graph under construction.
        offers: Takes them.
    """

    def __init__(self, builder: Builder, offers: Offers) -> None:
        self._builder = builder
        self._offers = offers

    def add(self, update: ParameterUpdate, operands: UpdateOperands) -> None:
        """Add the terms of an update, in front of its op."""
        terms = _Terms(self._builder, update, operands)
        for name, compute in terms.by_name().items():
            self._offers.add(self._builder.graph, name, partial(compute, name))


class _Terms:
    """The terms of one update."""

    def __init__(self, builder: Builder, update: ParameterUpdate, operands: UpdateOperands) -> None:
        self._builder = builder
        self._update = update
        self._given = operands

    def by_name(self) -> dict[str, Callable[[str], Tensor]]:
        """Return what computes each term; it is given the term's name."""
        parameter, kind = self._update.parameter, self._update.kind
        found: dict[str, Callable[[str], Tensor]] = {}
        if kind == "sgd_update" and self._update.gradient == GradientInput.ACCUMULATOR:
            found[names.final_reduced_gradient(parameter)] = self._final_gradient
        if kind == "sgd_combined_update":
            if self._given.gradient is not None:
                found[names.velocity_before_update(parameter)] = self._velocity_before_update
            found[names.velocity_into_update(parameter)] = self._velocity_into_update
        if self._update.attributes.get("nesterov"):
            found[names.unscaled_gradient(parameter)] = self._unscaled_gradient
            found[names.nesterov_gradient(parameter)] = self._nesterov_gradient
        if kind in ("adam_update", "lamb_update"):
            found[names.update_term("AdamUpdater", parameter)] = self._adam_term
        if kind == "lamb_update":
            found[names.update_term("LambR1Sq", parameter)] = self._weight_norm
            found[names.update_term("LambR2Sq", parameter)] = self._term_norm
        if kind == "rmsprop_update":
            found[names.update_term("AdaptiveUpdater", parameter)] = self._rmsprop_term
        return found

    # SGD

    def _final_gradient(self, name: str) -> Tensor:
        assert self._given.gradient is not None
        return self._copy(self._given.gradient, name)

    def _velocity_before_update(self, name: str) -> Tensor:
        """``v + dampening * g`` behind a micro-batch, with the gradients so far."""
        code, at = MapCode(), self._given.scalars
        velocity = self._added(code, code("mul", at["dampeningScaleFactor1"], self._gradient(code)))
        place = Place(Phase.BACKWARD, self._given.gradient_stage, name)
        return self._map(code, velocity, place)

    def _velocity_into_update(self, name: str) -> Tensor:
        if self._given.gradient is None:
            return self._copy(self._given.states["Accl"], name)
        code = MapCode()
        return self._map(code, self._velocity(code), self._place(name))

    def _velocity(self, code: MapCode) -> MapValue:
        """The velocity as the weight's step has it."""
        at, version = self._given.scalars, self._version
        gradient = code("mul", at[f"dampeningScaleFactor{version}"], self._clipped(code))
        if version == 1:  # it contains the rest already
            return self._added(code, gradient)
        kept = code("mul", at["scaledMomentum2"], self._given.states["Accl"])
        decay = code("mul", at["scaledWeightDecay1"], self._given.weight)
        return code("add", code("add", decay, kept), gradient)

    def _added(self, code: MapCode, gradient: MapValue) -> MapValue:
        return code("add", self._given.states["Accl"], gradient)

    @property
    def _version(self) -> int:
        return 1 if self._update.kind == "sgd_combined_update" else 2

    def _unscaled(self, code: MapCode) -> MapValue:
        scale = self._given.scalars[f"nesterovDampeningScaleFactor{self._version}"]
        return code("mul", scale, self._clipped(code))

    def _unscaled_gradient(self, name: str) -> Tensor:
        code = MapCode()
        return self._map(code, self._unscaled(code), self._place(name))

    def _nesterov_gradient(self, name: str) -> Tensor:
        """``scale * (g + weight_decay * w) + momentum * v``, with the true gradient."""
        code, at = MapCode(), self._given.scalars
        decay = code("mul", at["sgdWeightDecay"], self._given.weight)
        gradient = code("add", self._unscaled(code), decay)
        scaled = code("mul", at[f"nesterovGradScaleFactor{self._version}"], gradient)
        kept = code("mul", at["sgdMomentum"], self._velocity(code))
        return self._map(code, code("add", scaled, kept), self._place(name))

    # Adam, AdamW, LAMB

    def _adam_term(self, name: str) -> Tensor:
        """``mhat / (sqrt(vhat) + eps)``, with the decay where that is decoupled."""
        code, at, weight = MapCode(), self._given.scalars, self._given.weight
        decay = code("mul", at["weightDecay"], weight)
        is_lamb = self._update.kind == "lamb_update"
        decoupled = is_lamb or bool(self._update.attributes["decoupled_weight_decay"])
        gradient = code("div", self._clipped(code), at["adamGradientScaling"])
        if not decoupled:
            gradient = code("add", gradient, decay)
        first = _average(code, at["adamBeta1"], self._given.states["Accl1"], gradient)
        square = code("square", gradient)
        second = _average(code, at["adamBeta2"], self._given.states["Accl2"], square)
        if "Step" in self._given.states:
            first = code("div", first, self._correction("adamBeta1", name))
            second = code("div", second, self._correction("adamBeta2", name))
        term = code("div", first, code("add", code("sqrt", second), at["adamEps"]))
        if decoupled:
            term = code("add", term, decay)
        return self._map(code, term, self._place(name))

    def _correction(self, beta: str, name: str) -> Tensor:
        """``1 - beta ** step``, without the cancellation of writing it so."""
        code = MapCode()
        step = code("add", self._given.states["Step"], 1.0)
        power = code("mul", step, code("log", self._given.scalars[beta]))
        correction = code("neg", code("expm1", power))
        return emit_map(self._builder, code, correction, torch.float32, (1,), self._place(name))

    def _weight_norm(self, name: str) -> Tensor:
        return self._sum_of_squares(self._given.weight, name)

    def _term_norm(self, name: str) -> Tensor:
        return self._sum_of_squares(self._adam_term(name), name)

    def _sum_of_squares(self, tensor: Tensor, name: str) -> Tensor:
        code = MapCode()
        squares = self._map(code, code("square", tensor), self._place(name))
        scalar = torch.empty((), device="meta")
        return reduce_all(self._builder, squares, scalar, "sum", self._place(name))

    # RMSprop

    def _rmsprop_term(self, name: str) -> Tensor:
        """``g' / (sqrt(s) + eps)``, in TensorFlow's variant ``g' / sqrt(s + eps)``."""
        code, at = MapCode(), self._given.scalars
        decay = code("mul", at["weightDecay"], self._given.weight)
        gradient = code("div", self._gradient(code), at["adaptiveGradientScaling"])
        gradient = code("add", gradient, decay)
        alpha, square = at["adaptiveAlpha"], code("square", gradient)
        mean_square = _average(code, alpha, self._given.states["Accl1"], square)
        if "Accl3" in self._given.states:
            mean = _average(code, alpha, self._given.states["Accl3"], gradient)
            # Rounding can take the variance below 0.
            mean_square = code("max", code("sub", mean_square, code("square", mean)), 0.0)
        if self._update.attributes["tf_variant"]:
            root = code("sqrt", code("add", mean_square, at["adaptiveEps"]))
        else:
            root = code("add", code("sqrt", mean_square), at["adaptiveEps"])
        return self._map(code, code("div", gradient, root), self._place(name))

    # What they share

    def _gradient(self, code: MapCode) -> MapValue:
        assert self._given.gradient is not None
        return code.value(self._given.gradient)

    def _clipped(self, code: MapCode) -> MapValue:
        """The gradient, brought down to the largest norm that the update allows."""
        gradient, norm = self._gradient(code), self._given.norm
        if norm is None:
            return gradient
        limit = float(self._update.attributes["max_grad_norm"])
        fits = code("le", norm, limit)
        return code("mul", gradient, code("where", fits, 1.0, code("div", limit, norm)))

    def _place(self, name: str) -> Place:
        return Place(self._given.phase, 0, name)

    def _map(self, code: MapCode, result: MapValue, place: Place) -> Tensor:
        shape = self._given.weight.shape
        return emit_map(self._builder, code, result, torch.float32, shape, place)

    def _copy(self, tensor: Tensor, name: str) -> Tensor:
        copy = self._builder.value(tensor.dtype, tensor.shape)
        self._builder.op("copy", [tensor], [copy], place=self._place(name))
        return copy


def _average(code: MapCode, keep: Tensor, old: Tensor, new: MapValue) -> MapValue:
    """``keep * old + (1 - keep) * new``."""
    rest = code("sub", 1.0, keep)
    return code("add", code("mul", keep, old), code("mul", rest, new))
