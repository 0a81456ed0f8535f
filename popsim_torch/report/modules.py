"""The cost of modules: sums over ops by module path and phase."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from popsim_torch.machine.figures import grade_of

__all__ = [
    "PHASES",
    "ModuleCost",
    "OpCost",
    "PhaseCost",
    "by_module",
    "by_purpose",
    "read_ops",
    "tree",
]

PHASES = ("forward", "backward", "update", "setup")
_OPTIMIZERS = {
    "sgd_update": "SGD",
    "sgd_product_update": "SGD",
    "sgd_momentum_update": "SGD with momentum",
    "sgd_combined_update": "SGD with momentum",
    "adam_update": "Adam",
    "lamb_update": "LAMB",
    "rmsprop_update": "RMSprop",
}
_ACCUMULATION = "gradient accumulation"
_PURPOSES = {
    "accumulate": _ACCUMULATION,
    "sgd_combined_accumulate": _ACCUMULATION,
    "gradient_norm": "norm of the gradients",
    **_OPTIMIZERS,
}


@dataclass(frozen=True)
class OpCost:
    """The simulated cost of an op of the program.

    Attributes:
        name: The tensor or update that it computes.
        kind: The kind of op.
        module: The path of its module, ``encoder.fc``; empty if it belongs to none.
        phase: ``forward``, ``backward``, ``update`` or ``setup``.
        stage: Its pipeline stage.
        ipu: The IPU that runs it, in a replica.
        source: ``file:line`` of the user's code, empty if unknown.
        executions: Number of executions in a call.
        cycles: The cycles of one execution; the four that follow are its parts.
        compute: Cycles in which tiles compute.
        exchange: Cycles in which tiles exchange data.
        sync: Cycles in which tiles wait for each other.
        glue: Cycles of control code.
        temporary_bytes: Bytes that it needs for itself while it runs, on the fullest tile.
        flops: Floating-point operations of one execution.
        formula: The formula of the cycles; empty if there is none, and it counts as no time.
        grade: ``A`` (published), ``B`` (fitted), ``C`` (assumed); empty without a formula.
        plan: How the op is divided among tiles; may be empty.
        inputs: Indices of the variables that it reads.
        outputs: Indices of the variables that it writes.
        recomputed: Whether it repeats an op of the forward pass.
    """

    name: str
    kind: str
    module: str
    phase: str
    stage: int
    ipu: int
    source: str
    executions: float
    cycles: float
    compute: float
    exchange: float
    sync: float
    glue: float
    temporary_bytes: int
    flops: float
    formula: str
    grade: str
    plan: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    recomputed: bool

    @property
    def call_cycles(self) -> float:
        """The cycles of all executions in a call."""
        return self.cycles * self.executions

    @property
    def purpose(self) -> str:
        """What it does for training, such as ``SGD`` or ``gradient accumulation``; else empty."""
        return _PURPOSES.get(self.kind, "")


@dataclass
class PhaseCost:
    """The simulated cost of some ops in a call.

    Attributes:
        ops: The number of ops.
        cycles: Cycles.
        flops: Floating-point operations.
        temporary_bytes: The largest number of bytes that one of the ops needs for itself.
        grades: The cycles by grade of their formula.
        without_formula: The number of ops that count as no time.
    """

    ops: int = 0
    cycles: float = 0.0
    flops: float = 0.0
    temporary_bytes: int = 0
    grades: dict[str, float] = field(default_factory=dict)
    without_formula: int = 0

    def add(self, op: OpCost) -> None:
        """Add an op."""
        self.ops += 1
        self.cycles += op.call_cycles
        self.flops += op.flops * op.executions
        self.temporary_bytes = max(self.temporary_bytes, op.temporary_bytes)
        if op.grade in ("A", "B", "C"):
            self.grades[op.grade] = self.grades.get(op.grade, 0.0) + op.call_cycles
        else:
            self.without_formula += 1

    @property
    def grade(self) -> str:
        """The grade of the sum: the worst one that makes up a tenth of it; ``-`` without cycles."""
        return grade_of(self.grades) if self.cycles else "-"


@dataclass
class ModuleCost:
    """The simulated cost of a module in a call, with the modules inside of it.

    Attributes:
        forward: The cost of the forward pass.
        backward: That of the backward pass, with what it recomputes and with accumulation.
        update: That of the weight update.
        setup: That of what runs once in a call.
        variable_bytes: The bytes of its parameters, states and accumulators.
    """

    forward: PhaseCost = field(default_factory=PhaseCost)
    backward: PhaseCost = field(default_factory=PhaseCost)
    update: PhaseCost = field(default_factory=PhaseCost)
    setup: PhaseCost = field(default_factory=PhaseCost)
    variable_bytes: int = 0

    @property
    def phases(self) -> tuple[PhaseCost, ...]:
        """The four phases."""
        return self.forward, self.backward, self.update, self.setup

    @property
    def cycles(self) -> float:
        """The cycles of all phases."""
        return sum(one.cycles for one in self.phases)

    @property
    def flops(self) -> float:
        """The floating-point operations of all phases."""
        return sum(one.flops for one in self.phases)

    @property
    def grade(self) -> str:
        """The grade of the cycles, as for a phase."""
        sums: dict[str, float] = {}
        for one in self.phases:
            for grade, cycles in one.grades.items():
                sums[grade] = sums.get(grade, 0.0) + cycles
        return grade_of(sums) if self.cycles else "-"


def read_ops(rows: Iterable[Mapping[str, Any]]) -> tuple[OpCost, ...]:
    """Return the ops of an estimate."""
    names = tuple(OpCost.__dataclass_fields__)
    return tuple(
        OpCost(**{**{name: row[name] for name in names}, **_tuples(row), "module": _path(row)})
        for row in rows
    )


def _tuples(row: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(row[name]) for name in ("inputs", "outputs")}


def _path(row: Mapping[str, Any]) -> str:
    """Return the path of a module with dots, as PyTorch writes it."""
    return str(row["module"]).replace("/", ".")


def by_module(
    ops: Iterable[OpCost], variables: Iterable[Mapping[str, Any]] = ()
) -> dict[str, ModuleCost]:
    """Return the cost of each module with the modules inside of it; ``""`` is the whole program.

    Args:
        ops: The ops.
        variables: The variables; those with the name of a parameter add their bytes.
    """
    sums: dict[str, ModuleCost] = {"": ModuleCost()}
    for op in ops:
        for path in _around(op.module):
            cost = sums.setdefault(path, ModuleCost())
            getattr(cost, op.phase if op.phase in PHASES else "setup").add(op)
    for one in variables:
        if one["class"] in ("parameters", "state", "accumulators"):
            owner = str(one["name"]).rpartition("___")[2].rpartition(".")[0]
            for path in _around(owner):
                if path in sums:
                    sums[path].variable_bytes += one["bytes"] * one["copies"]
    return sums


def _around(module: str) -> list[str]:
    parts = module.split(".") if module else []
    return [".".join(parts[:depth]) for depth in range(len(parts) + 1)]


def by_purpose(ops: Iterable[OpCost]) -> dict[str, PhaseCost]:
    """Return the cost of what only training needs: the optimizer, gradient accumulation, ..."""
    sums: dict[str, PhaseCost] = {}
    for op in ops:
        if op.purpose:
            sums.setdefault(op.purpose, PhaseCost()).add(op)
    return sums


def tree(names: Sequence[str]) -> list[str]:
    """Return module paths in the given order, each followed by the modules inside of it."""
    place = {name: number for number, name in enumerate(names)}

    def key(name: str) -> list[int]:
        return [place[one] for one in _around(name)]

    return sorted(place, key=key)
