"""Plans the updates of an optimizer from its traced step.

Most optimizers update each parameter without the others; then parameters of one kind share a trace.
Others, such as those that divide by a norm of all gradients, are traced with all parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from popsim_torch.errors import Error
from popsim_torch.lowering.formula import is_elementwise
from popsim_torch.optim.nested import Path, leaves_and_empty, path_name
from popsim_torch.optim.plan import ParameterUpdate, Scalar, State
from popsim_torch.optim.rules import (
    AccumulationMode,
    Target,
    gradient_scaling,
    separate_accumulation,
)
from popsim_torch.optim.settings import OptimizerSettings
from popsim_torch.optim.step_source import StepSource
from popsim_torch.optimizer_steps.derive import derive
from popsim_torch.optimizer_steps.held import is_simple
from popsim_torch.optimizer_steps.places import find_places
from popsim_torch.optimizer_steps.source import Slot, check_attributes
from popsim_torch.optimizer_steps.traced_step import Cell, TracedStep
from popsim_torch.optimizer_steps.ways import TooManyPaths

__all__ = ["trace_updates"]

Targets = Sequence[tuple[Target, torch.Tensor]]
_MOST_KEPT = 64
_Key = tuple[object, tuple[object, ...], bool]

# The traced steps of each class, by what they depend on besides numbers.
_kept: WeakKeyDictionary[type[Any], dict[_Key, list[TracedStep]]] = WeakKeyDictionary()
_independent: WeakKeyDictionary[type[Any], dict[object, bool]] = WeakKeyDictionary()


def trace_updates(
    settings: OptimizerSettings, targets: Targets, mode: AccumulationMode
) -> list[ParameterUpdate]:
    """Return the updates of an optimizer whose own step is traced.

    Args:
        settings: The values of the optimizer.
        targets: The parameters.
        mode: How gradients are combined.

    Raises:
        Error: The step does something that the device cannot do.
    """
    assert settings.source is not None
    return _Updates(settings, settings.source, targets, mode).all()


class _Updates:
    def __init__(
        self,
        settings: OptimizerSettings,
        source: StepSource,
        targets: Targets,
        mode: AccumulationMode,
    ) -> None:
        self._settings = settings
        self._source = source
        self._targets = targets
        self._mode = mode
        self._structure = source.structure()
        self._values = source.numbers()
        group_of = {
            id(parameter): index
            for index, group in enumerate(settings.groups)
            for parameter in group.parameters
        }
        self._slots = [
            Slot(
                group_of.get(id(parameter), len(settings.groups)),
                tuple(parameter.shape),
                target.dtype,
                tuple((name, one) for name, one in vars(parameter).items() if is_simple(one)),
            )
            for target, parameter in targets
        ]
        parameters = [parameter for _, parameter in targets]
        check_attributes(source, parameters)
        self._places = find_places(settings, self._slots, parameters)
        if self._places.names_count:
            names = {
                id(parameter): name
                for group in settings.groups
                for parameter, name in zip(group.parameters, group.names, strict=False)
            }
            self._slots = [
                dataclasses.replace(slot, name=names.get(id(one), ""))
                for slot, one in zip(self._slots, parameters, strict=True)
            ]

    def all(self) -> list[ParameterUpdate]:
        """Return the updates of all parameters."""
        if not self._targets:
            return []
        if not self._is_independent():
            return self._updates_of(range(len(self._targets)))
        updates = []
        for position in range(len(self._targets)):
            updates += self._updates_of([position])
        return updates

    def _is_independent(self) -> bool:
        """Return whether each parameter is updated without the others."""
        if len(self._targets) == 1:
            return True
        known = _independent.setdefault(self._source.kind, {})
        if self._structure not in known:
            first = self._slots[0]
            other = next((one for one in self._slots if one.group != first.group), first)
            positions = [0, 1 if other is first else self._slots.index(other)]
            try:
                step = self._derived(positions)
            except TooManyPaths:  # one of the two may have few enough
                step = self._derive(positions, one_by_one=True)
            known[self._structure] = step.parts_are_independent()
        return known[self._structure] and not self._places.count

    def _derived(self, positions: Sequence[int]) -> TracedStep:
        """Return the traced step of some parameters, from memory if it is there."""
        slots = [self._slots[position] for position in positions]
        kept = _kept.setdefault(self._source.kind, {})
        for key in (self._key(slots, shaped=False), self._key(slots, shaped=True)):
            for step in kept.get(key, ()):
                if step.holds(self._values):
                    return step
        similar = next(
            (
                one
                for (structure, *_), steps in kept.items()
                if structure == self._structure
                for one in steps
            ),
            None,
        )
        step = self._derive(positions, similar)
        if step.formula.any_shape:
            nodes = step.formula.graph_module.graph.nodes
            shaped = len(slots) > 1 or not slots[0].shape
            shaped |= any(cell.shape not in ((), slots[0].shape) for cell in step.cells[0])
            calls = [node for node in nodes if node.op in ("call_function", "get_attr")]
            if shaped or not all(map(is_elementwise, calls)):
                formula = dataclasses.replace(step.formula, any_shape=False)
                step = dataclasses.replace(step, formula=formula)
        if len(kept) >= _MOST_KEPT:
            kept.clear()
            _independent.pop(self._source.kind, None)
        kept.setdefault(self._key(slots, shaped=not step.formula.any_shape), []).append(step)
        return step

    def _derive(
        self,
        positions: Sequence[int],
        similar: TracedStep | None = None,
        *,
        one_by_one: bool = False,
    ) -> TracedStep:
        slots = [self._slots[position] for position in positions]
        return derive(
            self._source,
            slots,
            lambda slot: self._host_state(positions[slot]),
            similar,
            one_by_one=one_by_one,
        )

    def _key(self, slots: Sequence[Slot], *, shaped: bool) -> _Key:
        described = [
            (
                *(slot.group, slot.dtype, slot.shape if shaped else bool(slot.shape)),
                *(slot.attributes, slot.name),
            )
            for slot in slots
        ]
        return self._structure, tuple(described), shaped

    def _host_state(self, position: int) -> Mapping[Path, Any]:
        """Return what the optimizer holds for a parameter on the host."""
        _, parameter = self._targets[position]
        state = dict(self._source.states.get(id(parameter), {}))
        return dict(leaves_and_empty(state)) if state else {}

    def _updates_of(self, positions: Sequence[int]) -> list[ParameterUpdate]:
        step = self._derived(positions)
        digest = step.formula.digest
        scalars: list[Scalar] = []
        for group, path in step.hyper_parameters:
            of_group = next(p for p in positions if self._slots[p].group == group)
            target, _ = self._targets[of_group]
            scalar = target.scalar(path_name(path), float, path_name(path))
            scalars.append(dataclasses.replace(scalar, dtype=torch.float64))
        updates = []
        for slot, position in enumerate(positions):
            target, parameter = self._targets[position]
            gradient, accumulations = separate_accumulation(self._settings.rule, target, self._mode)
            scaling = gradient_scaling(target, "gradientScaling", self._mode)
            host = self._host_state(position)
            states = [self._state(target, parameter, cell, host, step) for cell in step.cells[slot]]
            updates.append(
                ParameterUpdate(
                    target.name,
                    "formula",
                    gradient,
                    tuple(states),
                    (*scalars, scaling),
                    attributes={"rule": digest},
                    accumulations=accumulations,
                    formula=step.formula,
                    constants=tuple((path, x) for one, path, x in step.constants if one == slot),
                )
            )
            self._check_names(states)
        return updates

    def _check_names(self, states: Sequence[State]) -> None:
        """Refuse two states with the same name."""
        found: dict[str, State] = {}
        for state in states:
            other = found.setdefault(state.kind, state)
            if other is not state:
                raise Error(
                    f"{self._source.kind.__name__} keeps two states that the device calls "
                    f"'{state.kind}': {other.path} and {state.path} (keys are joined with dots). "
                    "Rename one of them."
                )

    def _state(
        self,
        target: Target,
        parameter: torch.Tensor,
        cell: Cell,
        host: Mapping[Path, Any],
        step: TracedStep,
    ) -> State:
        shape = cell.shape
        if step.formula.any_shape and shape and not cell.owner:
            shape = tuple(parameter.shape)
        state = target.state(cell.name, cell.dtype, initial=cell.initial)
        given = self._given(cell, host)
        if isinstance(given, (int, float)):
            given = torch.tensor(float(given), dtype=cell.dtype)
        begins = cell.initial_from
        if begins is not None:
            # (the step may have been traced for an optimizer with other numbers)
            values = tuple(self._values[key] for key in step.all_hyper_parameters)
            begins = dataclasses.replace(begins, values=values)
        return dataclasses.replace(
            state,
            dtype=cell.dtype,
            per_element=bool(shape) and shape == tuple(parameter.shape),
            shape=shape,
            initial_from=begins,
            given=given if isinstance(given, torch.Tensor) else None,
            path=cell.path,
            owner=cell.owner,
            number=_number_of(cell),
        )

    def _given(self, cell: Cell, host: Mapping[Path, Any]) -> Any:
        """Return the value that the optimizer has for a cell now; None if it has none."""
        if cell.is_flag:
            return 1.0 if host else None
        if cell.owner == "group":
            if not cell.is_number:
                return self._source.group_tensors().get(cell.path)
            return self._source.number(cell.path[0], cell.path[1])
        if cell.owner == "attribute":
            return self._source.attributes.get(cell.path[0])
        return None if cell.owner else host.get(cell.path)


def _number_of(cell: Cell) -> str:
    return "flag" if cell.is_flag else cell.number
