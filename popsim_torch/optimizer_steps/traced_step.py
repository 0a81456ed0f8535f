"""The result of tracing a step: its formula, and what it leaves to the next step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from popsim_torch.ir import names
from popsim_torch.optim.formula import InitialValue, UpdateFormula
from popsim_torch.optim.nested import Path, path_name
from popsim_torch.optimizer_steps.compare import depends_on, results_of, root_of
from popsim_torch.optimizer_steps.numbers import Known, evaluate
from popsim_torch.optimizer_steps.source import Slot

__all__ = ["FLAG", "Cell", "CellKey", "TracedStep"]

CellKey = tuple[int, str, Path]
"""What identifies a cell: slot, owner and path."""

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
        number: ``bool``, ``int`` or ``float`` if the host has a number or a truth value of
            Python's; nothing for a tensor.
        initial: The number that fills it before the first step.
        initial_from: How it begins, if that is no such number.
    """

    slot: int
    path: Path
    owner: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    number: str = ""
    initial: float = 0.0
    initial_from: InitialValue | None = None

    @property
    def is_flag(self) -> bool:
        """Whether the cell says that a parameter has been updated before."""
        return self.owner == "flag"

    @property
    def is_number(self) -> bool:
        """Whether the host has a number or a truth value of Python's."""
        return bool(self.number)

    @property
    def name(self) -> str:
        """The name of the cell without its parameter: its path in the state.

        It begins with ``state`` if it would be the name of another tensor of the program.
        """
        if self.is_flag:
            return FLAG
        if not self.owner:
            name = path_name(self.path)
            taken = name == FLAG or names.is_reserved(names.state(name, ""))
            return f"state.{name}" if taken else name
        if self.owner == "group":
            return f"group.{path_name(self.path[1])}"
        return f"{'optimizer' if self.owner == 'attribute' else 'state'}.{path_name(self.path)}"

    @property
    def key(self) -> CellKey:
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
        constants: What else is in the states: slot, path and value of each.
    """

    slots: tuple[Slot, ...]
    formula: UpdateFormula
    cells: tuple[tuple[Cell, ...], ...]
    hyper_parameters: tuple[tuple[int, Path], ...]
    all_hyper_parameters: tuple[tuple[int, Path], ...]
    noted: tuple[tuple[Known, object], ...]
    constants: tuple[tuple[int, Path, Any], ...] = ()

    def holds(self, values: Mapping[tuple[int, Path], float]) -> bool:
        """Return whether a step with other hyper-parameters would be the same."""
        try:
            return all(evaluate(known, values) == answer for known, answer in self.noted)
        except (ArithmeticError, ValueError, KeyError):
            return False

    def unchanged_group_tensors(self) -> set[CellKey]:
        """Return the tensors in groups that the step leaves as they are."""
        placeholders = (n for n in self.formula.graph_module.graph.nodes if n.op == "placeholder")
        results = iter(results_of(self.formula.graph_module))
        found = set()
        for cells in self.cells:
            next(placeholders), next(placeholders), next(results)  # weight and gradient
            for cell in cells:
                node, result = next(placeholders), next(results)
                of_group = cell.owner == "group" and not cell.is_number
                if of_group and root_of(result) is node:
                    found.add(cell.key)
        return found

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
            if depends_on(next(results), foreign, counts_shapes=False):
                return False
            for cell in cells:
                others = every if cell.owner else foreign
                if depends_on(next(results), others, counts_shapes=False):
                    return False
        return True
