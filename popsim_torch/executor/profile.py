"""The time that each op of a compiled model takes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch

from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.ir.labels import OpLabels
from popsim_torch.processes.exchange import ExchangeParts
from popsim_torch.tables import Described, terminal_width

_MAX_ROWS = 30
_PHASES = ("forward", "backward", "update")


@dataclass(frozen=True)
class OpTime:
    """The time of one op of the program.

    Attributes:
        name: The tensor or update that the op computes; ``backward of <name of the forward op>`` if
            that has no name.
        kind: The kind of op on the device.
        phase: ``forward``, ``backward`` or ``update``.
        stage: Pipeline stage.
        scope: Path of the modules that call the op: ``encoder/fc``.
        layer: The module, as in ``named_modules``: ``encoder.fc``. Updates and accumulations belong
            to the module of their parameter; empty for ops that belong to the whole model or to
            several modules.
        source: ``file:line`` of the user's code, empty when unknown.
        executions: Number of executions in one call.
        seconds: The time of all executions in one call: the median over the calls.
    """

    name: str
    kind: str
    phase: str
    stage: int
    scope: str
    source: str
    executions: int
    seconds: float
    layer: str = ""


@dataclass
class ModuleTime:
    """The time of a module in one call, with the modules inside of it, in seconds."""

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0

    @property
    def total(self) -> float:
        """The time of all phases."""
        return self.forward + self.backward + self.update


class Profile(Sequence[OpTime], Described):
    """The ops that ran, in the program's order.

    ``print`` shows the ops that took longest, and below them the sums by phase and by module.
    """

    def __init__(self, ops: Sequence[OpTime]) -> None:
        self._ops = tuple(ops)

    @property
    def seconds(self) -> float:
        """The time of all ops in one call."""
        return sum(op.seconds for op in self._ops)

    @overload
    def __getitem__(self, index: int) -> OpTime: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[OpTime]: ...
    def __getitem__(self, index: int | slice) -> OpTime | Sequence[OpTime]:
        return self._ops[index]

    def __len__(self) -> int:
        return len(self._ops)

    def __iter__(self) -> Iterator[OpTime]:
        return iter(self._ops)

    def by_phase(self) -> dict[str, float]:
        """Return the time of each phase in one call (s), by name."""
        sums = dict.fromkeys(_PHASES, 0.0)
        for op in self._ops:
            sums[op.phase] = sums.get(op.phase, 0.0) + op.seconds
        return sums

    def by_module(self) -> dict[str, ModuleTime]:
        """Return the time of each module in one call, by its name.

        The time of a module includes the modules inside of it; the name ``""`` is the whole model.
        """
        sums: dict[str, ModuleTime] = {}
        for op in self._ops:
            parts = op.layer.split(".") if op.layer else []
            for depth in range(len(parts) + 1):
                time = sums.setdefault(".".join(parts[:depth]), ModuleTime())
                if op.phase in _PHASES:
                    setattr(time, op.phase, getattr(time, op.phase) + op.seconds)
        return sums

    def __repr__(self) -> str:
        phases = ", ".join(f"{name} {1e6 * time:.1f}" for name, time in self.by_phase().items())
        return f"Profile({len(self)} ops, {1e6 * self.seconds:.1f} us in one call: {phases})"

    def _figures(self) -> dict[str, object]:
        modules = {name or "(all)": time.total for name, time in self.by_module().items()}
        rows = [*self.by_phase().items(), *modules.items()]
        return {name: f"{1e6 * seconds:.1f} us" for name, seconds in rows}

    def __str__(self) -> str:
        return "\n".join([*self._op_lines(), "", *self._module_lines()])

    def _op_lines(self) -> Iterator[str]:
        total, width = self.seconds or 1.0, terminal_width()
        slowest = sorted(self._ops, key=lambda op: -op.seconds)
        yield f"{'us':>10} {'share':>6} {'runs':>5}  op"
        for op in slowest[:_MAX_ROWS]:
            layer = f", {op.layer}" if op.layer else ""
            line = (
                f"{op.seconds * 1e6:10.1f} {op.seconds / total:6.1%} {op.executions:5}  "
                f"{op.kind} '{op.name}' ({op.phase} {op.stage}{layer})"
            )
            source = op.source.removeprefix(f"{os.getcwd()}{os.sep}")
            if source and (width is None or len(line) + len(source) + 2 <= width):
                line += f"  {source}"
            yield line[:width]
        rest = slowest[_MAX_ROWS:]
        if rest:
            seconds = sum(op.seconds for op in rest)
            yield f"{seconds * 1e6:10.1f} {seconds / total:6.1%}        {len(rest)} others"
        yield f"{self.seconds * 1e6:10.1f} {1:6.1%}        all {len(self)} ops"

    def _module_lines(self) -> Iterator[str]:
        """Yield the sums by phase and module: modules as a tree, in the order of execution."""
        total, width = self.seconds or 1.0, terminal_width()
        yield "".join(f"{name:>10} " for name in ("us", *_PHASES)) + f"{'share':>6}  module"
        modules = self.by_module()
        for name in _as_tree(modules):
            time = modules[name]
            figures = (time.total, time.forward, time.backward, time.update)
            path = name.split(".") if name else ["(all)"]
            label = "  " * len(path[1:]) + path[-1]
            text = "".join(f"{1e6 * seconds:10.1f} " for seconds in figures)
            yield f"{text}{time.total / total:6.1%}  {label}"[:width]


def _as_tree(names: Iterable[str]) -> list[str]:
    """Return modules in the given order, each followed by the modules inside of it."""
    place = {name: number for number, name in enumerate(names)}

    def path(name: str) -> list[int]:
        parts = name.split(".")
        return [place[".".join(parts[: depth + 1])] for depth in range(len(parts))]

    return sorted(place, key=path)


def profile(
    compiled: CompiledModel,
    inputs: list[torch.Tensor],
    repeats: int,
    exchange: ExchangeParts | None = None,
) -> Profile:
    """Run a program several times and return the time of each op.

    Args:
        compiled: The model.
        inputs: The inputs of the program.
        repeats: Number of calls; each one is a normal call.
        exchange: As for a run.
    """
    ops = compiled.host_program.graph.ops
    labels = OpLabels(compiled.host_program, (compiled.program,))
    return Profile(
        [
            OpTime(
                name=labels.name(ops[time.op]),
                kind=ops[time.op].kind,
                phase=ops[time.op].phase.name.lower(),
                stage=ops[time.op].stage,
                scope=ops[time.op].origin.scope,
                source=ops[time.op].origin.source,
                executions=time.executions,
                seconds=time.seconds,
                layer=labels.layer(ops[time.op]),
            )
            for time in compiled.executable.profile(inputs, repeats, compiled.host_code, exchange)
        ]
    )
