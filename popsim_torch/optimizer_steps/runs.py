"""Runs of a step on tensors of a trace: one for each combination of answers to conditions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from popsim_torch.errors import Error
from popsim_torch.optim.nested import (
    Path,
    is_number,
    is_truth,
    leaves_and_empty,
    number_kind,
    path_name,
    put,
)
from popsim_torch.optim.step_source import StepSource
from popsim_torch.optimizer_steps.cells import States
from popsim_torch.optimizer_steps.functions import StepFunctions
from popsim_torch.optimizer_steps.held import is_same, refuse_change, refuse_objects
from popsim_torch.optimizer_steps.mistakes import LeafChanges
from popsim_torch.optimizer_steps.noting import NotingDict
from popsim_torch.optimizer_steps.numbers import (
    Choices,
    Known,
    StepNumber,
    StepTruth,
    truth_as_number,
)
from popsim_torch.optimizer_steps.source import Slot, changed_attributes, rebuilt
from popsim_torch.optimizer_steps.traced_step import Cell, CellKey
from popsim_torch.optimizer_steps.watch import StepWatch, entries_of_groups
from popsim_torch.optimizer_steps.ways import (
    Outcome,
    every_combination,
    joined,
    joined_one_by_one,
    one_by_one,
)
from popsim_torch.private_torch.modes import DisableTorchFunction
from popsim_torch.private_torch.tensors import pose_as_parameter

__all__ = ["ChangingTruths", "Given", "LateNumbers", "StepRuns"]


class LateNumbers(Exception):
    """Raised if a later step changes numbers of groups or attributes that the first one leaves.

    Attributes:
        kinds: What the host has for each of them.
    """

    def __init__(self, kinds: dict[CellKey, str]) -> None:
        super().__init__()
        self.kinds = kinds


class ChangingTruths(Exception):
    """Raised if steps change truth values in states: these are numbers of the device.

    Attributes:
        keys: The truth values.
    """

    def __init__(self, keys: set[CellKey]) -> None:
        super().__init__()
        self.keys = keys


@dataclass(frozen=True)
class Given:
    """The tensors of a trace on which a step runs.

    Attributes:
        weights: The weights.
        gradients: Their gradients.
        states: What the last step left.
        moving: Tensors and numbers beside the states of parameters, which steps change.
        numbers: The hyper-parameters.
        is_first: Whether the step begins without the states.
    """

    weights: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]
    states: Mapping[CellKey, torch.Tensor]
    moving: Mapping[CellKey, torch.Tensor]
    numbers: Mapping[tuple[int, Path], torch.Tensor]
    is_first: bool = False

    def of_first_step(self) -> Given:
        """Return the same without states, which the first step makes."""
        return replace(self, is_first=True)


class StepRuns:
    """Runs the step of an optimizer.

    Args:
        source: The optimizer.
        slots: The parameters.
        hyper: The tensors in groups that are hyper-parameters: steps leave them as they are.

    Attributes:
        values: The present hyper-parameters.
        moving: Cells beside the states of parameters: tensors in attributes and groups, and numbers
            there that steps change.
        added: Those of these cells that the first step makes.
        sometimes: Those of them that the first step makes in some of its ways only.
        read: The entries of groups that steps after the first one have read: group and key.
        changed: The numbers beside the states of parameters that a run has changed.
        constants: What else is in the states after a step.
        kinds: The states that are numbers on the host: ``bool``, ``int`` or ``float``.
        truths: The truth values of states that steps change.
        noted: The conditions on hyper-parameters so far, with their answers.
        knows_first: Whether conditions on the numbers with which states begin are answered.
        reads_shapes: Whether a run has asked for the shape of a tensor.
        one_by_one: Whether only one condition at a time gets another answer: to find out which
            parameters a result depends on, not to compute it.
    """

    def __init__(
        self, source: StepSource, slots: Sequence[Slot], hyper: Collection[CellKey] = ()
    ) -> None:
        self._source = source
        self._slots = tuple(slots)
        self._names = [slot.name for slot in slots]
        groups = {slot.group for slot in slots}
        kept: dict[CellKey, torch.Tensor] = {
            self.key_of("attribute", (name,)): one for name, one in source.tensors().items()
        }
        for path, one in source.group_tensors().items():
            key = self.key_of("group", path)
            if path[0] in groups and key not in hyper:
                kept[key] = one
        self.moving = list(map(_cell_of_tensor, kept, kept.values()))
        self.values = {
            path: value
            for path, value in source.numbers().items()
            if path[0] in groups and self.key_of("group", path) not in kept
        }
        self.added: set[CellKey] = set()
        self.sometimes: set[CellKey] = set()
        self.read: set[tuple[int, Any]] = set()
        self.changed: set[CellKey] = set()
        self.constants: dict[CellKey, Any] = {}
        self.kinds: dict[CellKey, str] = {}
        self.truths: set[CellKey] = set()
        self.noted: list[tuple[Known, object]] = []
        self.knows_first = False
        self.reads_shapes = False
        self.one_by_one = False
        self._indices = tuple(dict.fromkeys(slot.group for slot in slots))
        self._watch = StepWatch(source, self._indices)
        self._leaf_changes = LeafChanges(source.kind)

    def key_of(self, owner: str, path: Path) -> CellKey:
        """Return what identifies something that a group or an attribute holds.

        Args:
            owner: ``group`` or ``attribute``.
            path: Where it is. What a group holds belongs to the first parameter of the group.
        """
        of_group = (i for i, slot in enumerate(self._slots) if slot.group == path[0])
        return next(of_group, 0) if owner == "group" else 0, owner, path

    def all_ways(self, given: Given) -> Outcome:
        """Run the step once for each combination of answers, and join the results."""
        failed = ZeroDivisionError()

        def attempt(answers: list[bool]) -> tuple[Choices, Outcome | None]:
            nonlocal failed
            choices = Choices(answers, self.values, self._source.kind.__name__)
            outcome = None
            try:
                outcome = self._run(choices, given)
            except ZeroDivisionError as error:  # other answers need not lead here
                failed = error
            self.noted += choices.noted
            return choices, outcome

        find = one_by_one if self.one_by_one else every_combination
        found = find(attempt, self._source.kind.__name__)
        if not found:
            raise failed
        outcomes = [outcome for _, outcome in found]
        self._check_constants(outcomes, {} if given.is_first else self.constants)
        self._complete(outcomes, given)
        return joined_one_by_one(found) if self.one_by_one else joined(found)

    def _check_constants(self, outcomes: Sequence[Outcome], before: Mapping[CellKey, Any]) -> None:
        """Find what steps change in the states beside numbers and tensors.

        Raises:
            ChangingTruths: They change truth values only.
            Error: They change something else.
        """
        found: set[CellKey] = set()
        for outcome in outcomes:
            for key, value in outcome.constants.items():
                first = before.get(key, outcomes[0].constants.get(key, value))
                if is_same(first, value):
                    continue
                if isinstance(value, bool) and isinstance(first, bool):
                    found.add(key)
                elif before:
                    refuse_change(self._source.kind, f"'{path_name(key[2])}' in a state")
            for _, _, path in sorted(before.keys() - outcome.constants.keys(), key=repr):
                if not any(key[2][: len(path)] == path for key in outcome.cells):
                    refuse_change(self._source.kind, f"'{path_name(path)}' in a state")
        if found:
            raise ChangingTruths(found)

    def _complete(self, outcomes: Sequence[Outcome], given: Given) -> None:
        """Give all runs the numbers that only some have changed; they are cells from now on."""
        every = {
            key: tensor
            for outcome in outcomes
            for key, tensor in outcome.cells.items()
            if key[1] in ("group", "attribute")
        }
        for key, tensor in every.items():
            for outcome in outcomes:
                if key in outcome.cells:
                    continue
                if key in self.added:  # the first step leaves the number as it is on the device
                    self.sometimes.add(key)
                    tensor = given.moving[key].clone()
                outcome.cells[key] = tensor

    def _run(self, choices: Choices, given: Given) -> Outcome:
        def number_of(value: float) -> StepNumber:
            with DisableTorchFunction():
                tensor = torch.full((), float(value), dtype=torch.float64)
            known = float(value) if self.knows_first and given.is_first else None
            return StepNumber(tensor, known, choices, whole=type(value) is int)

        def of_state(
            tensor: torch.Tensor, kind: str, known: float | None = None
        ) -> StepNumber | StepTruth:
            if kind == "bool":
                return StepTruth(tensor != 0, None if known is None else bool(known), choices)
            return StepNumber(tensor.clone(), known, choices, whole=kind == "int")

        weights = [tensor.clone() for tensor in given.weights]
        for weight, gradient in zip(weights, given.gradients, strict=True):
            weight.grad = gradient.clone()
            pose_as_parameter(weight)
        for weight, slot in zip(weights, self._slots, strict=True):
            vars(weight).update(slot.attributes)
        hyper: dict[Any, StepNumber | StepTruth | torch.Tensor] = {
            key: StepNumber(
                tensor, ("name", key), choices, whole=type(self._source.number(*key)) is int
            )
            for key, tensor in given.numbers.items()
        }
        attributes = {}
        for cell in self.moving:
            if given.is_first and cell.key in self.added:
                continue
            tensor = given.moving[cell.key]
            begins = cell.initial if self.knows_first and given.is_first else None
            value = of_state(tensor, cell.number, begins) if cell.is_number else tensor.clone()
            if cell.owner == "group":
                hyper[cell.path[0], cell.path[1]] = value
            else:
                attributes[cell.path] = value
        kept = States(number_of)
        if not given.is_first:
            self._fill(kept, weights, given.states, of_state)
        optimizer = rebuilt(
            self._source, self._slots, weights, hyper, attributes, kept, self._names
        )
        self._watch.recall(optimizer)
        before = dict(vars(optimizer))
        groups_before = entries_of_groups(self._indices, optimizer)
        self._leaf_changes.watch(weights)
        # Gradients are recorded where eager PyTorch would do it; no tensor here asks for them.
        with (
            self._watch.unchanged(optimizer, weights, groups_before, self.constants),
            torch.enable_grad(),
            StepFunctions(choices, self._leaf_changes) as mode,
        ):
            type(optimizer).step(optimizer)
        if not given.is_first:
            for index, group in zip(self._indices, optimizer.param_groups, strict=True):
                keys = group.read if isinstance(group, NotingDict) else group
                self.read |= {(index, key) for key in keys}
        self.reads_shapes = self.reads_shapes or mode.reads_shapes
        return self._outcome(optimizer, weights, groups_before, before, kept)

    def _fill(
        self,
        kept: States,
        weights: Sequence[torch.Tensor],
        states: Mapping[CellKey, torch.Tensor],
        of_state: Callable[[torch.Tensor, str], StepNumber | StepTruth],
    ) -> None:
        """Put tensors where the last step left the states."""
        entries: dict[CellKey, Any] = dict(self.constants)
        for key, tensor in states.items():
            if key[1] == "flag":
                continue
            kind = self.kinds.get(key)
            entries[key] = of_state(tensor, kind) if kind else tensor.clone()
        for (slot, owner, path), value in entries.items():
            if isinstance(value, (dict, list, tuple)):  # (an empty one)
                value = copy.copy(value)
            if owner == "other":
                state, rest = kept[path[0]], path[1:]
            else:
                state, rest = kept[weights[slot]], path
            put(state, rest, value)

    def _outcome(
        self,
        optimizer: torch.optim.Optimizer,
        weights: list[torch.Tensor],
        groups: Mapping[tuple[int, Path], Any],
        attributes: Mapping[str, Any],
        kept: States,
    ) -> Outcome:
        outcome = Outcome([w.clone() for w in weights], {}, {}, {}, {})
        slots = {id(weight): slot for slot, weight in enumerate(weights)}
        prefix: Path
        for owner, state in kept.items():
            if isinstance(owner, torch.Tensor):
                slot, name, prefix = slots[id(owner)], "", ()
            else:
                slot, name, prefix = 0, "other", (owner,)
            for path, leaf in leaves_and_empty(state):
                if not path:  # nothing is kept
                    continue
                outcome_key = slot, name, (*prefix, *path)
                whole = path in state.whole
                self._note(outcome, outcome_key, leaf, state.initial.get(path), whole=whole)
        entries = entries_of_groups(self._indices, optimizer)
        for (index, path), leaf in entries.items():
            is_tensor = isinstance(leaf, torch.Tensor) and len(path) == 1
            if not (is_tensor or is_number(leaf) or is_truth(leaf)):
                continue
            if leaf is not groups.get((index, path)):
                self._note(outcome, self.key_of("group", (index, path)), leaf, None)
        for path in changed_attributes(attributes, optimizer):
            self._note(outcome, self.key_of("attribute", path), vars(optimizer)[path[0]], None)
        for cell in self.moving:
            if not cell.is_number and cell.owner == "attribute":
                self._note(outcome, cell.key, vars(optimizer)[cell.path[0]], None)
            elif not cell.is_number and (cell.path[0], cell.path[1]) in entries:
                self._note(outcome, cell.key, entries[cell.path[0], cell.path[1]], None)
            elif cell.is_number and cell.key not in outcome.cells:
                # A number that stays in this run; there is none before the first step adds it.
                same = (
                    groups.get((cell.path[0], cell.path[1]))
                    if cell.owner == "group"
                    else attributes.get(cell.path[0])
                )
                if same is not None:
                    outcome.cells[cell.key] = same.tensor.to(torch.float64, copy=True)
        return outcome

    def _changes(self, key: CellKey) -> bool:
        """Return whether steps change a truth value."""
        return key[1] in ("group", "attribute") or key in self.truths

    def _note(
        self,
        outcome: Outcome,
        key: CellKey,
        leaf: Any,
        initial: torch.Tensor | None,
        *,
        whole: bool = False,
    ) -> None:
        if key[1] in ("group", "attribute"):
            self.changed.add(key)
        if isinstance(leaf, StepNumber):
            outcome.cells[key] = leaf.tensor.clone()
            outcome.numbers[key] = "int" if whole else "float"
        elif isinstance(leaf, StepTruth) or (is_truth(leaf) and self._changes(key)):
            outcome.cells[key] = truth_as_number(leaf)
            outcome.numbers[key] = "bool"
        elif isinstance(leaf, torch.Tensor):
            if leaf.is_sparse:
                raise Error("The optimizer keeps a sparse tensor; the device has dense ones only.")
            outcome.cells[key] = leaf.clone()
        elif is_number(leaf):
            outcome.cells[key] = torch.full((), float(leaf), dtype=torch.float64)
            outcome.numbers[key] = number_kind(leaf)
        else:
            refuse_objects(self._source.kind, key[2], leaf)
            outcome.constants[key] = leaf
            return
        if initial is not None:
            outcome.initial[key] = initial


def _cell_of_tensor(key: CellKey, tensor: torch.Tensor) -> Cell:
    slot, owner, path = key
    dtype = torch.float32 if tensor.dtype == torch.float64 else tensor.dtype
    return Cell(slot, path, owner, tuple(tensor.shape), dtype)
