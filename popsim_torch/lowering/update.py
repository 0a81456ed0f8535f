"""Lowers an optimizer plan: accumulation and weight updates.

The ops of updates work with real numbers. They see complex weights, gradients and states as pairs,
as the optimizers of PyTorch do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from popsim_torch.errors import Error
from popsim_torch.ir import Attribute, Phase, Program, Role, Tensor, TensorKind, names
from popsim_torch.ir.map_code import MapCode
from popsim_torch.lowering.emit.builder import Builder, Place
from popsim_torch.lowering.emit.maps import cast, emit_map
from popsim_torch.lowering.formula import FormulaLowering
from popsim_torch.lowering.gradient_queues import GradientQueues
from popsim_torch.lowering.loss_scale import LossScaleLowering
from popsim_torch.lowering.update_terms import final_gradient, velocity_so_far
from popsim_torch.optim.captures import GradientEnqueue
from popsim_torch.optim.plan import (
    Accumulation,
    GradientInput,
    OptimizerPlan,
    ParameterUpdate,
    Scalar,
    State,
)

_AT_END = Place(Phase.UPDATE, 0, "update")


class UpdateLowering:
    """Adds the ops of an optimizer plan to a program.

    Args:
        builder: The graph under construction.
        program: Has the parameters; receives states, scalars, and offers of values in updates.
        loss_scale: Set if the device adapts the loss scale.
    """

    def __init__(
        self,
        builder: Builder,
        program: Program,
        loss_scale: LossScaleLowering | None = None,
    ) -> None:
        self._builder = builder
        self._program = program
        self._loss_scale = loss_scale
        self._states: dict[str, Tensor] = {}
        # The gradient of the latest step, by the parameter's name.
        self._gradients: dict[str, Tensor] = {}
        # The names of the accumulators that hooks of the user change, by the parameter's name.
        self._accumulated: dict[str, str] = {}

    def weight(self, parameter: str) -> Tensor:
        """Return the tensor of a parameter on the device."""
        return self._builder.graph.tensors[self._program.parameters[parameter]]

    def accumulate(
        self, parameter: str, accumulation: Accumulation, gradient: Tensor, place: Place
    ) -> Tensor:
        """Accumulate a gradient before the end of the backward pass.

        Args:
            parameter: The name of the parameter.
            accumulation: How it is accumulated.
            gradient: The gradient of a micro-batch.
            place: The place in the backward pass.

        Returns:
            The accumulator.
        """
        self._gradients[parameter] = gradient
        self._accumulated[parameter] = accumulation.state.name
        self._accumulate(parameter, accumulation, place)
        return self._state(parameter, accumulation.state)

    def step(
        self,
        plan: OptimizerPlan,
        gradients: Mapping[str, Tensor],
        place: Place,
        named: Collection[str],
    ) -> None:
        """Add the updates of some parameters at a place inside of the iteration.

        Args:
            plan: The updates of all parameters.
            gradients: Their gradients, by name.
            place: The place of the step in the iteration.
            named: The parameters whose results get names: the last values in an iteration.
        """
        self._gradients |= gradients
        updates = [update for update in plan.updates if update.parameter in gradients]
        for update in updates:
            for accumulation in update.accumulations:
                self._accumulate(update.parameter, accumulation, place)
        norm = self._gradient_norm(plan, updates, place)
        self._update_all(updates, norm, place, named)

    def lower(
        self,
        plan: OptimizerPlan,
        gradients: Mapping[str, Tensor],
        elements: Iterable[GradientEnqueue] = (),
    ) -> None:
        """Add the accumulations to the backward pass, and the updates at the end.

        Args:
            plan: The updates.
            gradients: The gradients of one micro-batch for the parameters that are updated at the
                end, by name.
            elements: The gradients that go into queues.
        """
        self._gradients |= {
            name: gradient for name, gradient in gradients.items() if name not in self._accumulated
        }
        at_end = [update for update in plan.updates if update.parameter in gradients]
        for update in at_end:
            if self._loss_scale is not None:
                gradient = self._gradients[update.parameter]
                seen = self._builder.graph.as_real(gradient)
                self._loss_scale.observe(seen, names.gradient(update.parameter))
            for accumulation in update.accumulations:
                if self._accumulated.get(update.parameter) != accumulation.state.name:
                    self._accumulate(update.parameter, accumulation)
        if plan.replicas > 1:
            self._reduce(plan, at_end)
        updates = {update.parameter: update for update in plan.updates}
        queues = GradientQueues(
            self._builder, self._gradients, lambda name: self._accumulator_of(updates[name])
        )
        for element in elements:
            queues.add(element)
        norm = self._gradient_norm(plan, at_end, _AT_END)
        if self._loss_scale is not None:
            # Before all updates, so that these can run together.
            for scalar in (s for update in at_end for s in update.scalars):
                self._scalar(scalar)
        self._update_all(at_end, norm, _AT_END, {update.parameter for update in at_end})

    def _update_all(
        self,
        updates: Sequence[ParameterUpdate],
        norm: Tensor | None,
        step: Place,
        named: Collection[str],
    ) -> None:
        self._copy_weights(updates, step)
        done: set[int] = set()
        for update in updates:
            formula = update.formula
            if formula is None:
                self._update(update, norm, step, named=update.parameter in named)
            elif formula.num_parameters == 1:
                self._by_formula([update], step, named)
            elif id(formula) not in done:
                done.add(id(formula))
                together = [one for one in updates if one.formula is formula]
                if len(together) < formula.num_parameters:
                    raise Error(
                        "The optimizer updates its parameters together, so each step needs the "
                        f"gradients of all {formula.num_parameters}; this one has "
                        f"{len(together)}: {', '.join(one.parameter for one in together)}."
                    )
                self._by_formula(together, step, named)
        for update in updates:
            if update.counter is not None:
                self._count(update.parameter, update.counter, step, named)

    def _count(self, parameter: str, counter: State, step: Place, named: Collection[str]) -> None:
        """Count an update of a parameter."""
        state = self._state(parameter, counter)
        place = replace(step, name=names.updated(counter.name))
        code = MapCode()
        more = code("add", state, 1.0)
        total = emit_map(self._builder, code, more, state.dtype, tuple(state.shape), place)
        whole = self._whole(state, place.name, named=parameter in named)
        self._builder.op("copy", [total], [whole], place=place)

    def _by_formula(
        self, updates: Sequence[ParameterUpdate], step: Place, named: Collection[str]
    ) -> None:
        """Add the ops of a formula for the parameters that it updates together."""
        formula = updates[0].formula
        assert formula is not None
        *scalars, scale = map(self._scalar, updates[0].scalars)
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        gradients: list[int] = []
        for update in updates:
            weight, gradient = self.weight(update.parameter), self._gradient_of(update)
            assert gradient is not None
            states = [self._state(update.parameter, state) for state in update.states]
            gradients.append(len(inputs) + 1)
            inputs += [weight, gradient, *states]
            shown = update.parameter in named
            names_of = (update.updated_name, *update.updated_state_names)
            for tensor, name in zip((weight, *states), names_of, strict=True):
                outputs.append(self._whole(tensor, name, named=shown))
        is_one = updates[0].scalars[-1].constant and updates[0].scalars[-1].value == 1
        place = replace(step, name=updates[0].updated_name)
        lowering = FormulaLowering(self._builder, formula, place)
        lowering.lower([*inputs, *scalars], outputs, gradients, None if is_one else scale)

    def _accumulate(
        self, parameter: str, accumulation: Accumulation, step: Place | None = None
    ) -> None:
        """Add an accumulation, directly after its gradient or at the place of the step."""
        gradient = self._gradients[parameter]
        place = Place(Phase.BACKWARD, self._stage_of(gradient), accumulation.output)
        state = self._state(parameter, accumulation.state)
        scalars = (self._scalar(s, place.phase, place.stage) for s in accumulation.scalars)
        inputs = [gradient, state, *scalars]
        out = self._whole(state, accumulation.output)
        self._op(
            accumulation.kind,
            inputs,
            [out],
            dict(accumulation.attributes),
            place=place,
            after=gradient if step is None else None,
        )

    def _reduce(self, plan: OptimizerPlan, updates: Sequence[ParameterUpdate]) -> None:
        """Add up the accumulators of all replicas, before anything reads them."""
        totals = {names.reduced_gradient(u.parameter): self._accumulator_of(u) for u in updates}
        if self._loss_scale is not None:
            totals |= {names.updated(count.name): count for count in self._loss_scale.counts}
        found = {name: total for name, total in totals.items() if total is not None}
        if not found:
            return
        here = plan.replicas_here
        groups = [
            group for total in found.values() for group in total.replica_groups or (0,) * here
        ]
        self._op(
            "all_reduce",
            list(found.values()),
            [self._whole(total, name) for name, total in found.items()],
            {"parameters": len(found), "groups": groups},
            place=replace(_AT_END, name="all_reduce"),
        )

    def _gradient_norm(
        self, plan: OptimizerPlan, updates: Sequence[ParameterUpdate], step: Place
    ) -> Tensor | None:
        if plan.max_grad_norm is None or not updates:
            return None
        place = replace(step, name=names.GLOBAL_NORM)
        gradients = [self._gradient_of(update) for update in updates]
        norm = self._builder.value(torch.float32, ())
        self._builder.graph.set_name(norm, place.name)
        inputs = [*gradients, self._scalar(plan.loss_scaling)]
        self._op("gradient_norm", inputs, [norm], dict(plan.norm_attributes), place=place)
        return norm

    def _copy_weights(self, updates: Sequence[ParameterUpdate], step: Place) -> None:
        """Copy gradients that are weights themselves, before an update changes these."""
        for update in updates:
            gradient = self._gradient_of(update)
            if gradient is None or update.gradient == GradientInput.ACCUMULATOR:
                continue
            if self._builder.graph.root(gradient).kind == TensorKind.VARIABLE:
                copy = self._builder.value(gradient.dtype, gradient.shape)
                self._op("copy", [gradient], [copy], {}, place=step)
                self._gradients[update.parameter] = copy

    def _update(
        self, update: ParameterUpdate, norm: Tensor | None, step: Place, *, named: bool = True
    ) -> None:
        place = replace(step, name=update.updated_name)
        weight = self.weight(update.parameter)
        gradient = self._gradient_of(update)
        states = [self._state(update.parameter, state) for state in update.states]
        scalars = list(map(self._scalar, update.scalars))
        inputs: list[Tensor | None] = [weight, gradient, *states, *scalars]
        if update.clipped:
            inputs.append(norm)
        if named and gradient is not None:
            self._offer_gradient(update, gradient, step)
        outputs: list[Tensor | None] = [self._whole(weight, update.updated_name, named=named)]
        for state, name in zip(states, update.updated_state_names, strict=True):
            outputs.append(self._whole(state, name, named=named))
        if named:
            outputs += self._terms(update, weight)
        self._op(update.kind, inputs, outputs, dict(update.attributes), place=place)

    def _op(
        self,
        kind: str,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor | None],
        attributes: Mapping[str, Attribute],
        *,
        place: Place,
        after: Tensor | None = None,
    ) -> None:
        """Add an op that sees complex numbers as pairs."""

        def pairs(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
            as_real = self._builder.graph.as_real
            return [None if tensor is None else as_real(tensor) for tensor in tensors]

        self._builder.op(kind, pairs(inputs), pairs(outputs), attributes, place=place, after=after)

    def _terms(self, update: ParameterUpdate, weight: Tensor) -> list[Tensor | None]:
        """Return the outputs for the terms of an update, up to the last one that is requested."""
        terms: list[Tensor | None] = []
        for term in update.terms:
            shape = weight.shape if term.per_element else ()
            dtype = torch.complex64 if shape and weight.dtype.is_complex else torch.float32
            value = functools.partial(self._builder.value, dtype, shape)
            terms.append(self._offer(term.name, value))
        while terms and terms[-1] is None:
            terms.pop()
        return terms

    def _offer_gradient(self, update: ParameterUpdate, gradient: Tensor, step: Place) -> None:
        """Offer the gradient before the update."""
        parameter = update.parameter
        if update.kind == "sgd_update" and update.gradient == GradientInput.ACCUMULATOR:
            name = names.final_reduced_gradient(parameter)
            place = replace(step, name=name)
            self._offer(name, lambda: final_gradient(self._builder, gradient, place))
        if update.kind == "sgd_combined_update":
            self._offer(
                names.velocity_before_update(parameter),
                lambda: self._velocity_so_far(update, gradient),
            )

    def _velocity_so_far(self, update: ParameterUpdate, gradient: Tensor) -> Tensor:
        parameter = update.parameter
        stage = self._stage_of(self._gradients[parameter])
        place = Place(Phase.BACKWARD, stage, names.velocity_before_update(parameter))
        (velocity,) = update.states
        dampening = {scalar.kind: scalar for scalar in update.scalars}["dampeningScaleFactor1"]
        factor = self._scalar(dampening, place.phase, place.stage)
        state = self._state(parameter, velocity)
        return velocity_so_far(self._builder, state, gradient, factor, place)

    def _offer(self, name: str, make: Callable[[], Tensor]) -> Tensor | None:
        """Make a tensor that exists only if it is anchored."""
        return self._program.offers.add(self._builder.graph, name, make)

    def _gradient_of(self, update: ParameterUpdate) -> Tensor | None:
        if update.gradient == GradientInput.NONE:
            return None
        if update.gradient == GradientInput.ACCUMULATOR:
            return self._accumulator_of(update)
        return self._gradients[update.parameter]

    def _accumulator_of(self, update: ParameterUpdate) -> Tensor | None:
        state = update.accumulator
        return None if state is None else self._state(update.parameter, state)

    def _stage_of(self, gradient: Tensor) -> int:
        written = self._builder.written_in(gradient)
        return 0 if written is None else written[1]

    def _state(self, parameter: str, state: State) -> Tensor:
        if state.name not in self._states:
            shape = state.shape_for(self.weight(parameter).shape)
            tensor = self._builder.graph.add_tensor(
                TensorKind.VARIABLE,
                state.dtype,
                shape,
                name=state.name,
                role=Role.ACCUMULATOR if state.accumulates else Role.STATE,
            )
            tensor.replica_groups = self.weight(parameter).replica_groups
            self._states[state.name] = tensor
            self._program.states[state.name] = tensor.id
        return self._states[state.name]

    def _scalar(self, scalar: Scalar, phase: Phase = Phase.UPDATE, stage: int = 0) -> Tensor:
        """Return a hyper-parameter for the ops of a phase and stage."""
        tensor = self._variable(scalar)
        if self._loss_scale is None:
            return tensor
        return self._loss_scale.follow(scalar, tensor, phase, stage)

    def _variable(self, scalar: Scalar) -> Tensor:
        known = self._program.scalars
        if scalar.name not in known:
            tensor = self._builder.graph.add_tensor(
                TensorKind.VARIABLE, scalar.dtype, (), role=Role.HYPER_PARAMETER
            )
            known[scalar.name] = tensor.id
            if not scalar.constant:
                self._builder.graph.set_name(self._shown(scalar, tensor), scalar.name)
        return self._builder.graph.tensors[known[scalar.name]]

    def _shown(self, scalar: Scalar, tensor: Tensor) -> Tensor:
        """Return the value that an anchor of a hyper-parameter shows."""
        if not self._program.offers.asked(scalar.name):
            return tensor
        return cast(self._builder, tensor, scalar.shown_dtype, Place(Phase.UPDATE, 0, scalar.name))

    def _whole(self, tensor: Tensor, name: str, *, named: bool = True) -> Tensor:
        graph = self._builder.graph
        role = Role.UPDATED if name == names.updated(tensor.name) else Role.VALUE
        view = graph.add_view(tensor, tensor.shape, tensor.strides, tensor.offset, role=role)
        if named:
            graph.set_name(view, name)
        return view
