"""How long each op of a compiled model takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch

from popsim_torch.executor.compiled_model import CompiledModel

_MAX_ROWS = 30


@dataclass(frozen=True)
class OpTime:
    """What one op of the program took.

    Attributes:
        name: The tensor or update that it computes.
        kind: The device's op.
        phase: ``forward``, ``backward`` or ``update``.
        stage: Pipeline stage.
        scope: Path of the modules that it belongs to.
        source: ``file:line`` of the user's code, empty when unknown.
        executions: How often it ran in one call (count).
        seconds: Of all executions in one call: the median over the calls.
    """

    name: str
    kind: str
    phase: str
    stage: int
    scope: str
    source: str
    executions: int
    seconds: float


class Profile(Sequence[OpTime]):
    """The ops that ran, in the program's order; ``print`` shows those that took longest."""

    def __init__(self, ops: Sequence[OpTime]) -> None:
        self._ops = tuple(ops)

    @property
    def seconds(self) -> float:
        """The time of all ops together, in one call."""
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

    def __str__(self) -> str:
        total = self.seconds or 1.0
        slowest = sorted(self._ops, key=lambda op: -op.seconds)
        lines = [f"{'us':>10} {'share':>6} {'runs':>5}  op"]
        for op in slowest[:_MAX_ROWS]:
            where = f"  {op.source}" if op.source else ""
            lines.append(
                f"{op.seconds * 1e6:10.1f} {op.seconds / total:6.1%} {op.executions:5}  "
                f"{op.kind} '{op.name}' ({op.phase} {op.stage}){where}"
            )
        if len(slowest) > _MAX_ROWS:
            rest = slowest[_MAX_ROWS:]
            seconds = sum(op.seconds for op in rest)
            lines.append(f"{seconds * 1e6:10.1f} {seconds / total:6.1%}        {len(rest)} others")
        return "\n".join(lines)


def profile(compiled: CompiledModel, inputs: list[torch.Tensor], repeats: int) -> Profile:
    """Run a program several times and return what each op took.

    Args:
        compiled: The model.
        inputs: As the program takes them.
        repeats: How many calls; each is a call like any other.
    """
    ops = compiled.host_program.graph.ops
    return Profile(
        [
            OpTime(
                name=ops[time.op].name,
                kind=ops[time.op].kind,
                phase=ops[time.op].phase.name.lower(),
                stage=ops[time.op].stage,
                scope=ops[time.op].origin.scope,
                source=ops[time.op].origin.source,
                executions=time.executions,
                seconds=time.seconds,
            )
            for time in compiled.executable.profile(inputs, repeats, compiled.host_code)
        ]
    )
