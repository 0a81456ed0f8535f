"""Makes the formula of an update by tracing the step of an optimizer.

The step runs twice: from no state, as the first one, and from the states that it leaves. If the
first run is the second one applied to constants, the program needs only the second, and states
begin with these constants. Otherwise the program has both, and a flag says which results hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from popsim_torch.errors import Error
from popsim_torch.optim.formula import UpdateFormula
from popsim_torch.optim.nested import Path, is_number, number_kind
from popsim_torch.optim.step_source import StepSource
from popsim_torch.optimizer_steps.beginnings import beginning
from popsim_torch.optimizer_steps.compare import (
    depends_on,
    is_continued,
    like_weights,
    prepare,
    results_of,
    simplify,
)
from popsim_torch.optimizer_steps.python_functions import python_numbers
from popsim_torch.optimizer_steps.refusals import failed_trace, other_states, shown_key
from popsim_torch.optimizer_steps.runs import (
    ChangingTruths,
    Given,
    LateNumbers,
    StepRuns,
)
from popsim_torch.optimizer_steps.source import Slot
from popsim_torch.optimizer_steps.traced_step import FLAG, Cell, CellKey, TracedStep
from popsim_torch.optimizer_steps.ways import Outcome
from popsim_torch.private_torch.fake import DataDependentOutputException, without_tracebacks
from popsim_torch.private_torch.proxies import record_graph
from popsim_torch.trace.graph.functionalise import functionalise_graph
from popsim_torch.trace.graph.repeated_operators import RepeatedOperators
from popsim_torch.trace.graph.traced_tensors import TraceMode

__all__ = ["derive"]


# What Python raises if the objects of a trace do not behave as numbers and tensors with values.
_MISTAKES = (
    AssertionError,
    AttributeError,
    DataDependentOutputException,
    IndexError,
    KeyError,
    NotImplementedError,
    StopIteration,
    TypeError,
)


class _Deriver:
    def __init__(
        self,
        source: StepSource,
        slots: Sequence[Slot],
        similar: TracedStep | None,
        one_by_one: bool,
    ) -> None:
        self._source = source
        self._slots = tuple(slots)
        self._similar = similar
        self._fakes = TraceMode()
        self._repeated = RepeatedOperators(self._fakes)
        self._runs = StepRuns(source, slots)
        self._runs.one_by_one = one_by_one
        self._values = dict(self._runs.values)
        # Tensors in groups that steps do not change.
        self._hyper: set[CellKey] = set()
        # Numbers of groups and attributes that only later steps change.
        self._late: dict[CellKey, str] = {}

    # --- Inputs of a trace: weights and gradients, cells, hyper-parameters ---

    def _fake(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with self._fakes:
            return torch.empty(tuple(shape), dtype=dtype)

    def _inputs(self, cells: Sequence[Cell]) -> list[torch.Tensor]:
        tensors = []
        for slot in self._slots:
            tensors += [self._fake(slot.shape, slot.dtype) for _ in range(2)]
        tensors += [self._fake(cell.shape, cell.dtype) for cell in cells]
        tensors += [self._fake((), torch.float64) for _ in self._runs.values]
        return tensors

    def _record(
        self, cells: Sequence[Cell], function: Callable[[Given], list[torch.Tensor]]
    ) -> torch.fx.GraphModule:
        """Record a function of weights and gradients, cells and hyper-parameters."""
        moving = {cell.key for cell in self._runs.moving}

        def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
            rest = iter(tensors)
            own = [next(rest) for _ in range(2 * len(self._slots))]
            kept = {cell.key: next(rest) for cell in cells}
            given = Given(
                own[::2],
                own[1::2],
                {key: tensor for key, tensor in kept.items() if key not in moving},
                {key: tensor for key, tensor in kept.items() if key in moving},
                dict(zip(self._runs.values, rest, strict=True)),
            )
            with self._repeated:
                return function(given)

        kind = self._source.kind
        inputs = self._inputs(cells)
        with torch.no_grad(), python_numbers(kind), without_tracebacks(), self._fakes:
            module = record_graph(flat)(*inputs)
        prepare(module)
        module, _ = functionalise_graph(module, ())
        like_weights(module, len(self._slots))
        return module

    # --- The whole ---

    def derive(self, host_states: Callable[[int], Mapping[Path, Any]]) -> TracedStep:
        """Return the traced step.

        Args:
            host_states: Returns what the optimizer holds for a slot on the host.
        """
        while True:
            try:
                step = self._derived(host_states)
                found_here = step.unchanged_group_tensors()
                if not found_here:
                    return step
                self._hyper |= found_here  # (numbers from now on)
                self._begin_again(self._runs.truths)
            except ChangingTruths as found:  # (expected from now on)
                truths = self._runs.truths | found.keys
                self._begin_again(truths)
            except LateNumbers as found:
                self._late |= found.kinds
                self._begin_again(self._runs.truths)

    def _begin_again(self, truths: set[CellKey]) -> None:
        """Forget all runs; expect what they have shown."""
        one_by_one = self._runs.one_by_one
        self._runs = StepRuns(self._source, self._slots, self._hyper)
        self._runs.one_by_one = one_by_one
        self._runs.truths = truths
        for key, kind in self._late.items():
            self._add_number(key, kind)
        self._values = dict(self._runs.values)

    def _derived(self, host_states: Callable[[int], Mapping[Path, Any]]) -> TracedStep:
        try:
            first, cells = self._traced_first_step()
        except _MISTAKES as error:
            first, cells = None, self._cells_of_host(host_states)
            if not cells:
                raise failed_trace(self._source, error) from error
        try:
            return self._joined(first, cells)
        except _MISTAKES as error:
            raise failed_trace(self._source, error) from error

    def _joined(
        self,
        first: tuple[torch.fx.GraphModule, dict[Any, int]] | None,
        cells: list[Cell],
    ) -> TracedStep:
        """Trace later steps, and return one step that does what the first one and these do."""
        later = self._later_step(cells)
        if first is None or is_continued(
            first[0],
            self._input_keys(self._runs.moving),
            {key: place for key, place in first[1].items()},
            later,
            self._input_keys(cells),
        ):
            module = later
        else:
            cells, module = self._both(cells)
        return self._finished(cells, module)

    def _input_keys(self, cells: Sequence[Cell]) -> list[object]:
        """Return what the inputs of a recorded function are."""
        own = [(kind, slot) for slot in range(len(self._slots)) for kind in ("weight", "gradient")]
        return [
            *own,
            *(cell.key for cell in cells),
            *(("number", key) for key in self._runs.values),
        ]

    def _traced_first_step(self) -> tuple[tuple[torch.fx.GraphModule, dict[Any, int]], list[Cell]]:
        """Trace the first step with all answers to its conditions, or else with the real ones.

        A first step may make a state under a condition that it fulfils (``step % 10 == 0``).
        """
        before = list(self._runs.moving)
        try:
            self._expect_numbers()
            return self._first_step(before)
        except (*_MISTAKES, Error):
            self._runs.knows_first = True
            self._forget_numbers(before)
            return self._first_step(before)

    def _expect_numbers(self) -> None:
        """Expect the numbers that the step of other parameters changes: finding them is a trace."""
        if self._similar is None:
            return
        groups = {slot.group for slot in self._slots}
        for cell in itertools.chain.from_iterable(self._similar.cells):
            if cell.is_number and (
                cell.owner == "attribute" or (cell.owner == "group" and cell.path[0] in groups)
            ):
                self._add_number(self._runs.key_of(cell.owner, cell.path), cell.number)

    def _add_number(self, key: CellKey, kind: str) -> None:
        if any(cell.key == key for cell in self._runs.moving):
            return
        self._runs.moving.append(self._moving_cell(key, kind))
        if key[1] == "group":
            self._runs.values.pop((key[2][0], key[2][1]), None)

    def _forget_numbers(self, moving: Sequence[Cell]) -> None:
        """Forget which numbers the step changes."""
        self._runs.moving, self._runs.values = list(moving), dict(self._values)
        self._runs.added, self._runs.sometimes = set(), set()

    def _first_step(
        self, certain: Sequence[Cell]
    ) -> tuple[tuple[torch.fx.GraphModule, dict[Any, int]], list[Cell]]:
        """Trace the step from no state; find all cells.

        Args:
            certain: Cells beside the states of parameters that are no numbers.
        """
        found: list[Outcome] = []

        def run(given: Given) -> list[torch.Tensor]:
            outcome = self._runs.all_ways(given.of_first_step())
            found.append(outcome)
            finals = [*outcome.weights, *outcome.cells.values()]
            return [*finals, *outcome.initial.values()]

        while True:
            self._runs.noted, self._runs.changed = [], set()
            module = self._record(self._runs.moving, run)
            outcome = found[-1]
            known = {cell.key: cell for cell in self._runs.moving}
            found_here = self._runs.changed | self._late.keys()
            if any(cell.is_number and cell.key not in found_here for cell in known.values()):
                self._forget_numbers(certain)  # another step changed it
                continue
            new = [
                key
                for key in outcome.cells
                if key[1] in ("group", "attribute") and key not in known
            ]
            if not new:
                break
            for key in new:
                tensor = outcome.cells[key]
                if key in outcome.numbers:
                    self._add_number(key, outcome.numbers[key])
                else:  # a tensor in a group
                    self._runs.added.add(key)
                    self._runs.moving.append(
                        Cell(key[0], key[2], key[1], tuple(tensor.shape), tensor.dtype)
                    )
        results = results_of(module)
        count = len(self._slots) + len(outcome.cells)
        initial = dict(zip(outcome.initial, range(count, len(results)), strict=True))
        self._runs.constants = outcome.constants
        self._runs.kinds = outcome.numbers
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        gradients = set(placeholders[1 : 2 * len(self._slots) : 2])
        initial = {
            key: place
            for key, place in initial.items()
            if not depends_on(results[place], gradients)
        }
        cells = []
        for key, tensor in outcome.cells.items():
            if key in known:
                cells.append(known[key])
                continue
            slot, owner, path = key
            kind = outcome.numbers.get(key, "")
            cell = Cell(slot, path, owner, tuple(tensor.shape), tensor.dtype, kind)
            if key in initial:
                cell = self._beginning(cell, module, results[initial[key]])
            cells.append(cell)
        return (module, initial), cells

    def _beginning(self, cell: Cell, module: torch.fx.GraphModule, node: torch.fx.Node) -> Cell:
        """Return a cell that begins with the value of a node of the first step."""
        placeholders = [one for one in module.graph.nodes if one.op == "placeholder"]
        numbers = placeholders[len(placeholders) - len(self._runs.values) :]
        begins = beginning(cell, module, node, [placeholders[2 * cell.slot], *numbers])
        if begins is None:
            raise Error(
                f"The state '{cell.name}' of {self._source.kind.__name__} begins with values of "
                "other parameters, which the device cannot compute before the first step."
            )
        return begins

    def _moving_cell(self, key: CellKey, kind: str) -> Cell:
        """Describe a number of a group or an attribute that steps change."""
        slot, owner, path = key
        if self._is_new(key):
            self._runs.added.add(key)
            return Cell(slot, path, owner, (), torch.float64, kind)
        value: Any = (
            self._source.number(path[0], path[1])
            if owner == "group"
            else self._source.attributes[path[0]]
        )
        kind = number_kind(value) or "float"  # (a group may have a tensor)
        return Cell(slot, path, owner, (), torch.float64, kind, float(value))

    def _is_new(self, key: CellKey) -> bool:
        """Return whether the first step makes a number of a group or an attribute."""
        _, owner, path = key
        if owner == "group":
            return self._source.number(path[0], path[1]) is None
        return path[0] not in self._source.attributes

    def _cells_of_host(self, host_states: Callable[[int], Mapping[Path, Any]]) -> list[Cell]:
        """Describe the states that the optimizer makes in its constructor."""
        self._runs.moving = [cell for cell in self._runs.moving if not cell.is_number]
        self._runs.constants, self._runs.kinds = {}, {}
        cells = list(self._runs.moving)
        for slot in range(len(self._slots)):
            for path, leaf in host_states(slot).items():
                key = slot, "", path
                if is_number(leaf) or key in self._runs.truths:
                    kind = self._runs.kinds[key] = number_kind(leaf)
                    cells.append(Cell(slot, path, "", (), torch.float64, kind, float(leaf)))
                elif isinstance(leaf, torch.Tensor):
                    cells.append(Cell(slot, path, "", tuple(leaf.shape), leaf.dtype))
                else:
                    self._runs.constants[key] = leaf
        return cells

    def _results(self, cells: Sequence[Cell], outcome: Outcome) -> list[torch.Tensor]:
        """Return the new weights and cells, in the order and dtypes of the cells."""
        missing = [cell for cell in cells if cell.key not in outcome.cells and not cell.is_flag]
        extra = set(outcome.cells) - {cell.key for cell in cells}
        late = {
            key: outcome.numbers.get(key, "float")
            for key in extra - self._late.keys()
            if key[1] in ("group", "attribute") and not self._is_new(key)
        }
        if late:
            raise LateNumbers(late)
        if missing or extra:
            keys = {*extra, *(cell.key for cell in missing)}
            names = dict.fromkeys(sorted(map(shown_key, keys)))
            of_groups = any(owner == "group" for _, owner, _ in keys)
            raise Error(
                f"The step of {self._source.kind.__name__} adds or removes states after its first "
                f"run ({', '.join(names)}). On the device, states are the same in every step. Make "
                "all of them in the first step"
                + (", and numbers of groups in the constructor; " if of_groups else "; ")
                + "for the last n gradients, one tensor with n rows and a count."
            )
        weights = [
            weight.to(slot.dtype) for weight, slot in zip(outcome.weights, self._slots, strict=True)
        ]
        states = []
        for cell in cells:
            if cell.is_flag:
                continue
            tensor = outcome.cells[cell.key].to(cell.dtype)
            if tuple(tensor.shape) != cell.shape:
                raise Error(
                    f"The step of {self._source.kind.__name__} changes the shape of "
                    f"{shown_key(cell.key)} from {list(cell.shape)} to {list(tensor.shape)}. On "
                    "the device, what a step leaves to the next one has one shape."
                )
            states.append(tensor)
        return [*weights, *states]

    def _later_step(self, cells: Sequence[Cell]) -> torch.fx.GraphModule:
        """Trace the step from the states that the last one left."""

        def run(given: Given) -> list[torch.Tensor]:
            return self._results(cells, self._runs.all_ways(given))

        return self._record(cells, run)

    def _both(self, cells: Sequence[Cell]) -> tuple[list[Cell], torch.fx.GraphModule]:
        """Trace a step that asks a flag whether it is the first one."""
        missed = set(filter(self._is_missed, self._runs.sometimes))
        if missed:
            raise other_states(missed)
        count = len(self._slots)
        flags = [Cell(slot, (FLAG,), "flag", (), torch.float32) for slot in range(count)]
        every = [*cells, *flags]

        def run(given: Given) -> list[torch.Tensor]:
            first = self._results(cells, self._runs.all_ways(given.of_first_step()))
            later = self._results(cells, self._runs.all_ways(given))
            results = []
            slots = [*range(count), *(cell.slot for cell in cells)]
            for slot, a, b in zip(slots, first, later, strict=True):
                begins = given.states[slot, "flag", (FLAG,)] == 0
                results.append(torch.where(begins, a, b))
            return [*results, *(torch.ones_like(given.states[flag.key]) for flag in flags)]

        return every, self._record(every, run)

    def _is_missed(self, key: CellKey) -> bool:
        """Return whether a later step may ask for a number that the first one has not made."""
        _, owner, path = key
        return owner != "group" or (path[0], path[1][0]) in self._runs.read

    def _finished(self, cells: Sequence[Cell], module: torch.fx.GraphModule) -> TracedStep:
        """Order inputs and results by parameter."""
        graph = module.graph
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        results = results_of(module)
        count = len(self._slots)
        by_slot = [[i for i, c in enumerate(cells) if c.slot == s] for s in range(count)]
        ordered: list[torch.fx.Node] = []
        finals: list[torch.fx.Node] = []
        for slot in range(count):
            ordered += placeholders[2 * slot : 2 * slot + 2]
            ordered += [placeholders[2 * count + i] for i in by_slot[slot]]
            finals += [results[slot], *(results[count + i] for i in by_slot[slot])]
        numbers = placeholders[2 * count + len(cells) :]
        read = [node for node in numbers if node.users]
        for node in graph.nodes:  # (a placeholder that the step changed)
            if node.op == "call_function" and not node.users and "copy_" in str(node.target):
                graph.erase_node(node)
        new = torch.fx.Graph()
        became: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in [*ordered, *read]:
            became[node] = new.node_copy(node)
        for node in graph.nodes:
            if node.op in ("call_function", "get_attr"):
                became[node] = new.node_copy(node, lambda one: became[one])
        new.output([became[node] for node in finals])
        simplify(new)
        keys = list(self._runs.values)
        chosen = tuple(keys[numbers.index(node)] for node in read)
        return TracedStep(
            self._slots,
            UpdateFormula(
                torch.fx.GraphModule(module, new),
                count,
                tuple(len(own) for own in by_slot),
                any_shape=not self._runs.reads_shapes,
            ),
            tuple(tuple(cells[i] for i in own) for own in by_slot),
            chosen,
            tuple(keys),
            tuple({repr(one): one for one in self._runs.noted}.values()),
            tuple(
                (slot, path, value)
                for (slot, owner, path), value in self._runs.constants.items()
                if not owner and isinstance(value, (str, bool, type(None), dict, list, tuple))
            ),
        )


def derive(
    source: StepSource,
    slots: Sequence[Slot],
    host_states: Callable[[int], Mapping[Path, Any]],
    similar: TracedStep | None = None,
    *,
    one_by_one: bool = False,
) -> TracedStep:
    """Trace the step of an optimizer for some of its parameters.

    Args:
        source: The optimizer.
        slots: The parameters.
        host_states: Returns what the optimizer holds for a slot on the host.
        similar: The step of other parameters, if it has been traced.
        one_by_one: Whether only one condition at a time gets another answer. Such a step tells
            which parameters depend on each other, and is no update.

    Raises:
        Error: The step does something that a device cannot do.
    """
    return _Deriver(source, slots, similar, one_by_one).derive(host_states)
