"""Makes the formula of an update by tracing the step of an optimizer.

The step runs twice: from no state, as the first one, and from the states that it leaves. If the
first run is the second one applied to constants, the program needs only the second, and states
begin with these constants. Otherwise the program has both, and a flag says which results hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from popsim_torch.errors import Error
from popsim_torch.optim.formula import InitialValue, UpdateFormula
from popsim_torch.optim.nested import Path, is_number, leaves, path_name, put
from popsim_torch.optim.step_source import StepSource
from popsim_torch.optimizer_steps.cells import States
from popsim_torch.optimizer_steps.compare import (
    depends_on,
    is_continued,
    like_weights,
    results_of,
    root_of,
    simplify,
    subgraph,
)
from popsim_torch.optimizer_steps.functions import StepFunctions
from popsim_torch.optimizer_steps.numbers import (
    MOST_PATHS,
    Choices,
    Known,
    StepNumber,
    evaluate,
    python_numbers,
)
from popsim_torch.optimizer_steps.source import Slot, changed_attributes, rebuilt
from popsim_torch.private_torch.fake import FakeTensorMode
from popsim_torch.private_torch.modes import DisableTorchFunction
from popsim_torch.private_torch.proxies import record_graph
from popsim_torch.trace.graph.functionalise import functionalise_graph

__all__ = ["Cell", "TracedStep", "derive"]

FLAG = "hasStepped"
"""The name of the state that says whether a parameter has been updated before."""


@dataclass(frozen=True)
class Cell:
    """A number or tensor that a step leaves to the next one.

    Attributes:
        slot: The parameter that it belongs to; the first one if it belongs to none.
        path: Where the optimizer keeps it: in the state of the parameter; or, with ``owner``,
            elsewhere.
        owner: Empty; ``group``, ``attribute`` or ``other`` (another entry of the states); ``flag``
            if the optimizer does not have it.
        shape: Its shape.
        dtype: Its dtype; float64 for numbers.
        is_number: Whether the host has a number of Python's.
        whole: Whether that is an ``int``.
        initial: The number that fills it before the first step.
        initial_from: How it begins, if that is no such number.
    """

    slot: int
    path: Path
    owner: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_number: bool = False
    whole: bool = False
    initial: float = 0.0
    initial_from: InitialValue | None = None

    @property
    def is_flag(self) -> bool:
        """Whether the cell says that a parameter has been updated before."""
        return self.owner == "flag"

    @property
    def name(self) -> str:
        """The name of the cell without its parameter: its path in the state."""
        if not self.owner or self.is_flag:
            return path_name(self.path)
        if self.owner == "group":
            return f"group.{path_name(self.path[1])}"
        return f"{'optimizer' if self.owner == 'attribute' else 'state'}.{path_name(self.path)}"

    @property
    def key(self) -> tuple[int, str, Path]:
        """What identifies the cell."""
        return self.slot, self.owner, self.path


@dataclass(frozen=True)
class TracedStep:
    """The traced step of some parameters.

    Attributes:
        slots: The parameters.
        formula: Their update.
        cells: What each parameter keeps, in the order of the formula's states.
        hyper_parameters: The keys of the numbers that the formula reads, in its order.
        all_hyper_parameters: The keys of the numbers that initial values are computed from.
        noted: The conditions on hyper-parameters with their answers.
    """

    slots: tuple[Slot, ...]
    formula: UpdateFormula
    cells: tuple[tuple[Cell, ...], ...]
    hyper_parameters: tuple[tuple[int, Path], ...]
    all_hyper_parameters: tuple[tuple[int, Path], ...]
    noted: tuple[tuple[Known, object], ...]

    def holds(self, values: Mapping[tuple[int, Path], float]) -> bool:
        """Return whether a step with other hyper-parameters would be the same."""
        try:
            return all(evaluate(known, values) == answer for known, answer in self.noted)
        except (ArithmeticError, ValueError, KeyError):
            return False

    def parts_are_independent(self) -> bool:
        """Return whether each parameter is updated without the others."""
        graph = self.formula.graph_module.graph
        placeholders = iter([node for node in graph.nodes if node.op == "placeholder"])
        # (numbers that belong to no parameter count the same for each)
        own = []
        for cells in self.cells:
            nodes = {next(placeholders), next(placeholders)}
            for cell in cells:
                node = next(placeholders)
                if not cell.owner:
                    nodes.add(node)
            own.append(nodes)
        results = iter(results_of(self.formula.graph_module))
        every = set().union(*own)
        for index, cells in enumerate(self.cells):
            foreign = every - own[index]
            if depends_on(next(results), foreign):
                return False
            for cell in cells:
                if depends_on(next(results), every if cell.owner else foreign):
                    return False
        return True


@dataclass
class _Outcome:
    """The tensors that a run of a step leaves."""

    weights: list[torch.Tensor]
    cells: dict[tuple[int, str, Path], torch.Tensor]
    constants: dict[tuple[int, str, Path], Any]
    initial: dict[tuple[int, str, Path], torch.Tensor]
    numbers: dict[tuple[int, str, Path], bool]  # whether the host has an int


class _Deriver:
    def __init__(self, source: StepSource, slots: Sequence[Slot]) -> None:
        self._source = source
        self._slots = tuple(slots)
        every = source.numbers()
        groups = {slot.group for slot in slots}
        self._values = {key: value for key, value in every.items() if key[0] in groups}
        self._fakes = FakeTensorMode()
        self._noted: list[tuple[Known, object]] = []
        self._reads_shapes = False
        # Cells beside the states of parameters: tensors in attributes, and numbers of groups and
        # attributes that steps change.
        self._moving = list(map(_cell_of_attribute, source.tensors().items()))
        self._constants: dict[tuple[int, str, Path], Any] = {}
        self._whole: dict[tuple[int, str, Path], bool] = {}

    # --- Inputs of a trace: weights and gradients, cells, hyper-parameters ---

    def _fake(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with self._fakes:
            return torch.empty(tuple(shape), dtype=dtype)

    def _inputs(self, cells: Sequence[Cell]) -> list[torch.Tensor]:
        tensors = []
        for slot in self._slots:
            tensors += [self._fake(slot.shape, slot.dtype) for _ in range(2)]
        tensors += [self._fake(cell.shape, cell.dtype) for cell in cells]
        tensors += [self._fake((), torch.float64) for _ in self._values]
        return tensors

    def _record(
        self,
        cells: Sequence[Cell],
        function: Callable[
            [list[torch.Tensor], dict[Any, torch.Tensor], dict[Any, Any]], list[Any]
        ],
    ) -> torch.fx.GraphModule:
        """Record a function of weights and gradients, cells and hyper-parameters."""

        def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
            given = list(tensors)
            own = [given.pop(0) for _ in range(2 * len(self._slots))]
            states = {cell.key: given.pop(0) for cell in cells}
            numbers = dict(zip(self._values, given, strict=True))
            return function(own, states, numbers)

        kind = self._source.kind
        inputs = self._inputs(cells)
        with torch.no_grad(), python_numbers(kind), self._fakes:
            module = record_graph(flat)(*inputs)
        module, _ = functionalise_graph(module, ())
        like_weights(module, len(self._slots))
        return module

    # --- Runs ---

    def _all_ways(
        self,
        own: list[torch.Tensor],
        states: dict[Any, torch.Tensor] | None,
        moving: dict[Any, torch.Tensor],
        numbers: dict[Any, torch.Tensor],
    ) -> _Outcome:
        """Run the step once for each combination of answers, and join the results."""
        found: list[tuple[Choices, _Outcome]] = []
        answers: list[bool] | None = []
        while answers is not None:
            if len(found) == MOST_PATHS:
                raise Error(
                    f"The step of {self._source.kind.__name__} asks for the values of so many "
                    f"conditions on numbers that change from step to step that it has more than "
                    f"{MOST_PATHS} different paths. Use torch.where in place of 'if'."
                )
            choices = Choices(answers, self._values)
            found.append((choices, self._run(choices, own, states, moving, numbers)))
            self._noted += choices.noted
            answers = choices.next_answers()
        return _joined(found, 0)

    def _run(
        self,
        choices: Choices,
        own: list[torch.Tensor],
        states: dict[Any, torch.Tensor] | None,
        moving: dict[Any, torch.Tensor],
        numbers: dict[Any, torch.Tensor],
    ) -> _Outcome:
        def number_of(value: float) -> StepNumber:
            with DisableTorchFunction():
                tensor = torch.full((), float(value), dtype=torch.float64)
            return StepNumber(tensor, None, choices)

        def of_state(tensor: torch.Tensor) -> StepNumber:
            return StepNumber(tensor.clone(), None, choices)

        weights = [tensor.clone() for tensor in own[::2]]
        for weight, gradient in zip(weights, own[1::2], strict=True):
            weight.grad = gradient.clone()
        hyper = {key: StepNumber(tensor, ("name", key), choices) for key, tensor in numbers.items()}
        attributes = {}
        for cell in self._moving:
            tensor = moving[cell.key]
            if cell.owner == "group":
                hyper[cell.path[0], cell.path[1]] = of_state(tensor)
            else:
                attributes[cell.path] = of_state(tensor) if cell.is_number else tensor.clone()
        kept = States(number_of)
        if states is not None:
            self._fill(kept, weights, states, of_state)
        optimizer = rebuilt(self._source, self._slots, weights, hyper, attributes, kept)
        with StepFunctions(choices) as mode:
            type(optimizer).step(optimizer)
        self._reads_shapes = self._reads_shapes or mode.reads_shapes
        return self._outcome(optimizer, weights, hyper, attributes, kept)

    def _fill(
        self,
        kept: States,
        weights: Sequence[torch.Tensor],
        states: dict[Any, torch.Tensor],
        of_state: Callable[[torch.Tensor], StepNumber],
    ) -> None:
        """Put tensors where the last step left the states."""
        entries: dict[tuple[int, str, Path], Any] = dict(self._constants)
        for key, tensor in states.items():
            entries[key] = of_state(tensor) if key in self._whole else tensor.clone()
        for (slot, owner, path), value in entries.items():
            if owner == "other":
                state, rest = kept[path[0]], path[1:]
            else:
                state, rest = kept[weights[slot]], path
            put(state, rest, value)

    def _outcome(
        self,
        optimizer: torch.optim.Optimizer,
        weights: list[torch.Tensor],
        hyper: Mapping[Any, StepNumber],
        attributes: Mapping[Path, Any],
        kept: States,
    ) -> _Outcome:
        outcome = _Outcome([w.clone() for w in weights], {}, {}, {}, {})
        slots = {id(weight): slot for slot, weight in enumerate(weights)}
        prefix: Path
        for owner, state in kept.items():
            if isinstance(owner, torch.Tensor):
                slot, name, prefix = slots[id(owner)], "", ()
            else:
                slot, name, prefix = 0, "other", (owner,)
            for path, leaf in leaves(state):
                outcome_key = slot, name, (*prefix, *path)
                whole = path in state.whole
                self._note(outcome, outcome_key, leaf, state.initial.get(path), whole=whole)
        indices = list(dict.fromkeys(slot.group for slot in self._slots))
        for index, group in zip(indices, optimizer.param_groups, strict=True):
            for path, leaf in leaves({k: v for k, v in group.items() if k != "params"}):
                if is_number(leaf) and leaf is not hyper.get((index, path), leaf):
                    self._note(outcome, (0, "group", (index, path)), leaf, None)
        for path in changed_attributes(self._source, optimizer):
            if vars(optimizer)[path[0]] is not attributes.get(path):
                self._note(outcome, (0, "attribute", path), vars(optimizer)[path[0]], None)
        for cell in self._moving:
            if not cell.is_number:
                self._note(outcome, cell.key, vars(optimizer)[cell.path[0]], None)
            elif cell.key not in outcome.cells:  # a number that stays in this run
                of_group = cell.owner == "group"
                same = hyper[cell.path[0], cell.path[1]] if of_group else attributes[cell.path]
                outcome.cells[cell.key] = same.tensor.clone()
        return outcome

    def _note(
        self,
        outcome: _Outcome,
        key: tuple[int, str, Path],
        leaf: Any,
        initial: torch.Tensor | None,
        *,
        whole: bool = False,
    ) -> None:
        if isinstance(leaf, StepNumber):
            outcome.cells[key] = leaf.tensor.clone()
            outcome.numbers[key] = whole
        elif isinstance(leaf, torch.Tensor):
            if leaf.is_sparse:
                raise Error("The optimizer keeps a sparse tensor; the device has dense ones only.")
            outcome.cells[key] = leaf.clone()
        elif is_number(leaf):
            outcome.cells[key] = torch.full((), float(leaf), dtype=torch.float64)
            outcome.numbers[key] = isinstance(leaf, int)
        else:
            outcome.constants[key] = leaf
            return
        if initial is not None:
            outcome.initial[key] = initial

    # --- The whole ---

    def derive(self, host_states: Callable[[int], Mapping[Path, Any]]) -> TracedStep:
        """Return the traced step.

        Args:
            host_states: Returns what the optimizer holds for a slot on the host.
        """
        try:
            first, cells = self._first_step()
        except (KeyError, AttributeError, IndexError, TypeError, AssertionError) as error:
            first, cells = None, self._cells_of_host(host_states)
            if not cells:
                raise _failed(self._source, error) from error
        later = self._later_step(cells)
        if first is None or is_continued(
            first[0],
            self._input_keys(self._moving),
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
        return [*own, *(cell.key for cell in cells), *(("number", key) for key in self._values)]

    def _first_step(self) -> tuple[tuple[torch.fx.GraphModule, dict[Any, int]], list[Cell]]:
        """Trace the step from no state; find all cells."""
        while True:
            found: list[_Outcome] = []

            def run(own: Any, states: Any, numbers: Any) -> list[Any]:
                outcome = self._all_ways(own, None, states, numbers)
                found.append(outcome)  # noqa: B023
                finals = [*outcome.weights, *outcome.cells.values()]
                return [*finals, *outcome.initial.values()]

            self._noted = []
            module = self._record(self._moving, run)
            outcome = found[-1]
            new = [
                self._moving_cell(key)
                for key in outcome.cells
                if key[1] in ("group", "attribute") and key not in {c.key for c in self._moving}
            ]
            if not new:
                break
            self._moving += new
            for cell in new:
                if cell.owner == "group":
                    self._values.pop((cell.path[0], cell.path[1]), None)
        results = results_of(module)
        count = len(self._slots) + len(outcome.cells)
        initial = dict(zip(outcome.initial, range(count, len(results)), strict=True))
        self._constants = outcome.constants
        self._whole = outcome.numbers
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        gradients = set(placeholders[1 : 2 * len(self._slots) : 2])
        initial = {
            key: place
            for key, place in initial.items()
            if not depends_on(results[place], gradients)
        }
        cells = []
        for key, tensor in outcome.cells.items():
            known = next((cell for cell in self._moving if cell.key == key), None)
            if known is not None:
                cells.append(known)
                continue
            cells.append(self._cell(key, tensor, module, results, initial.get(key)))
        return (module, initial), cells

    def _cell(
        self,
        key: tuple[int, str, Path],
        tensor: torch.Tensor,
        module: torch.fx.GraphModule,
        results: Sequence[torch.fx.Node],
        begin: int | None,
    ) -> Cell:
        """Describe a cell that the first step has made."""
        slot, owner, path = key
        dtype = tensor.dtype
        whole = self._whole.get(key)
        shape = tuple(tensor.shape)
        cell = Cell(slot, path, owner, shape, dtype, whole is not None, bool(whole))
        if begin is None:
            return cell
        node = results[begin]
        cell = dataclasses.replace(cell, dtype=node.meta["val"].dtype)
        fill = _fill_of(node)
        if fill is not None:
            return dataclasses.replace(cell, initial=fill)
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        read = [placeholders[2 * slot], *placeholders[len(placeholders) - len(self._values) :]]
        graph = subgraph(module, node, read)
        if graph is None:
            raise Error(
                f"The state '{cell.name}' of {self._source.kind.__name__} begins with values of "
                "other parameters, which the device cannot compute before the first step."
            )
        return dataclasses.replace(
            cell,
            initial_from=InitialValue(graph),  # with the values of the optimizer at hand
        )

    def _moving_cell(self, key: tuple[int, str, Path]) -> Cell:
        """Describe a number of a group or an attribute that steps change."""
        _, owner, path = key
        if owner == "group":
            value: Any = self._source.numbers()[path[0], path[1]]
            now = dict(leaves(dict(self._source.groups[path[0]])))[path[1]]
        else:
            value = now = self._source.attributes[path[0]]
        whole = isinstance(now, int)
        return Cell(0, path, owner, (), torch.float64, True, whole, float(value))

    def _cells_of_host(self, host_states: Callable[[int], Mapping[Path, Any]]) -> list[Cell]:
        """Describe the states that the optimizer makes in its constructor."""
        self._moving = [cell for cell in self._moving if not cell.is_number]
        self._constants, self._whole = {}, {}
        cells = list(self._moving)
        for slot in range(len(self._slots)):
            for path, leaf in host_states(slot).items():
                key = slot, "", path
                if is_number(leaf):
                    self._whole[key] = True
                    whole = isinstance(leaf, int)
                    cell = Cell(slot, path, "", (), torch.float64, True, whole, float(leaf))
                    cells.append(cell)
                elif isinstance(leaf, torch.Tensor):
                    cells.append(Cell(slot, path, "", tuple(leaf.shape), leaf.dtype))
                else:
                    self._constants[key] = leaf
        return cells

    def _split(
        self, cells: Sequence[Cell], states: Mapping[Any, torch.Tensor]
    ) -> tuple[dict[Any, torch.Tensor], dict[Any, torch.Tensor]]:
        moving = {cell.key for cell in self._moving}
        own = {
            key: tensor for key, tensor in states.items() if key not in moving and key[1] != "flag"
        }
        return own, {key: tensor for key, tensor in states.items() if key in moving}

    def _results(self, cells: Sequence[Cell], outcome: _Outcome) -> list[torch.Tensor]:
        """Return the new weights and cells, in the order and dtypes of the cells."""
        missing = [cell for cell in cells if cell.key not in outcome.cells and not cell.is_flag]
        extra = set(outcome.cells) - {cell.key for cell in cells}
        if missing or extra:
            names = sorted(str(key[2]) for key in {*extra, *(cell.key for cell in missing)})
            raise Error(
                f"The step of {self._source.kind.__name__} adds or removes states after its first "
                f"run ({', '.join(names)}). On the device, states are the same in every step."
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
                    f"The step of {self._source.kind.__name__} changes the shape of its state "
                    f"'{cell.path[-1]}' from {list(cell.shape)} to {list(tensor.shape)}. On the "
                    "device, states have one shape."
                )
            states.append(tensor)
        return [*weights, *states]

    def _later_step(self, cells: Sequence[Cell]) -> torch.fx.GraphModule:
        """Trace the step from the states that the last one left."""

        def run(own: Any, states: Any, numbers: Any) -> list[Any]:
            kept, moving = self._split(cells, states)
            return self._results(cells, self._all_ways(own, kept, moving, numbers))

        return self._record(cells, run)

    def _both(self, cells: Sequence[Cell]) -> tuple[list[Cell], torch.fx.GraphModule]:
        """Trace a step that asks a flag whether it is the first one."""
        count = len(self._slots)
        flags = [Cell(slot, (FLAG,), "flag", (), torch.float32) for slot in range(count)]
        every = [*cells, *flags]

        def run(own: Any, states: Any, numbers: Any) -> list[Any]:
            kept, moving = self._split(cells, states)
            first = self._results(cells, self._all_ways(own, None, moving, numbers))
            later = self._results(cells, self._all_ways(own, kept, moving, numbers))
            results = []
            slots = [*range(count), *(cell.slot for cell in cells)]
            for slot, a, b in zip(slots, first, later, strict=True):
                begins = states[slot, "flag", (FLAG,)] == 0
                results.append(torch.where(begins, a, b))
            return [*results, *(torch.ones_like(states[flag.key]) for flag in flags)]

        return every, self._record(every, run)

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
        keys = list(self._values)
        chosen = tuple(keys[numbers.index(node)] for node in read)
        return TracedStep(
            self._slots,
            UpdateFormula(
                torch.fx.GraphModule(module, new),
                count,
                tuple(len(own) for own in by_slot),
                any_shape=not self._reads_shapes,
            ),
            tuple(tuple(cells[i] for i in own) for own in by_slot),
            chosen,
            tuple(keys),
            tuple({repr(one): one for one in self._noted}.values()),
        )


def _cell_of_attribute(item: tuple[str, torch.Tensor]) -> Cell:
    name, tensor = item
    dtype = torch.float32 if tensor.dtype == torch.float64 else tensor.dtype
    return Cell(0, (name,), "attribute", tuple(tensor.shape), dtype)


def _joined(found: list[tuple[Choices, _Outcome]], depth: int) -> _Outcome:
    """Choose, on the device, between the results of runs with other answers."""
    if len(found) == 1:
        return found[0][1]
    condition = found[0][0].conditions[depth]
    yes = _joined([one for one in found if one[0].answers[depth]], depth + 1)
    no = _joined([one for one in found if not one[0].answers[depth]], depth + 1)
    if yes.cells.keys() != no.cells.keys() or yes.constants != no.constants:
        raise Error(
            "The optimizer keeps other states after one branch of an 'if' than after the other. "
            "On the device, states are the same in every step."
        )

    def pick(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.where(condition.reshape(()), a, b.to(a.dtype))

    return _Outcome(
        list(map(pick, yes.weights, no.weights)),
        {key: pick(tensor, no.cells[key]) for key, tensor in yes.cells.items()},
        yes.constants,
        yes.initial,
        yes.numbers | no.numbers,
    )


def _fill_of(node: torch.fx.Node) -> float | None:
    """Return the number that fills a new tensor; None for any other node."""
    aten = torch.ops.aten
    node = root_of(node)
    target: Any = node.target
    if target in (aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default):
        return 0.0
    if target in (aten.ones_like.default, aten.ones.default, aten.new_ones.default):
        return 1.0
    if target in (aten.full.default, aten.full_like.default, aten.new_full.default):
        value: Any = node.args[-1]
        return float(value) if isinstance(value, (int, float)) else None
    return None


def _failed(source: StepSource, error: Exception) -> Error:
    return Error(
        f"The step of {source.kind.__name__} cannot be traced: {type(error).__name__}: {error}"
    )


def derive(
    source: StepSource,
    slots: Sequence[Slot],
    host_states: Callable[[int], Mapping[Path, Any]],
) -> TracedStep:
    """Trace the step of an optimizer for some of its parameters.

    Args:
        source: The optimizer.
        slots: The parameters.
        host_states: Returns what the optimizer holds for a slot on the host.

    Raises:
        Error: The step does something that a device cannot do.
    """
    return _Deriver(source, slots).derive(host_states)
