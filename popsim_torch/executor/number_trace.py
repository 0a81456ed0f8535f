"""Finds which op of a run computed the bad number that a check found."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from popsim_torch import _native
from popsim_torch.ir import Graph, Op, Program, Role, TensorKind
from popsim_torch.passes.check_numbers import WatchedTensors

__all__ = ["Origin", "find_origin", "op_at"]

_NO_MASKS = (Role.PARAMETER, Role.STATE, Role.ACCUMULATOR, Role.HYPER_PARAMETER)


@dataclass(frozen=True)
class Origin:
    """The origin of a bad number.

    Attributes:
        execution: The execution of the op that computed it, or that first read it.
        noticed_in: The id of the tensor in which a check finds it.
        given: The id of the bad tensor that no op computed; None if an op computed it.
        given_infinity: The id of a tensor that came with the infinity from which the op computed
            NaN; None if there is none.
    """

    execution: _native.BadExecution
    noticed_in: int
    given: int | None = None
    given_infinity: int | None = None


def op_at(program: Program, path: Sequence[int]) -> tuple[Graph, Op]:
    """Return the op at a path (``BadExecution.path``), and the graph that it is in."""
    graph = program.graph
    op = graph.ops[path[0]]
    for body, position in zip(path[1::2], path[2::2], strict=True):
        graph = op.bodies[body]
        op = graph.ops[position]
    return graph, op


def find_origin(
    program: Program, watched: WatchedTensors, executions: Sequence[_native.BadExecution]
) -> Origin | None:
    """Return the origin of the first bad number in a watched tensor; None if there is none.

    The search goes backwards: from the op whose result is watched to the op that computed its bad
    operand, and so on. So a number that is bad on purpose, such as a mask of ``-inf``, is not found
    unless it led to the result.

    Args:
        program: The program that ran, without fused ops.
        watched: The tensors that are checked.
        executions: The executions with bad results, in their order.
    """
    graph = program.graph
    roots = {graph.root_of(i).id for i in watched.all}
    for position, execution in enumerate(executions):
        if len(execution.path) > 1:
            continue
        for result in execution.results:
            if graph.root_of(result.tensor).id in roots:
                return _Search(program, executions).backwards(position, result)
    return None


class _Search:
    """Follows a bad number backwards through the executions of a run."""

    def __init__(self, program: Program, executions: Sequence[_native.BadExecution]) -> None:
        self._program = program
        self._executions = executions

    def backwards(self, position: int, result: _native.BadTensor) -> Origin:
        """Return the origin of a bad result of an execution."""
        noticed_in, nan = result.tensor, result.nan
        maker: int | None = None  # the execution that computed NaN from an infinity
        while True:
            execution = self._executions[position]
            inner = self._inside(position, nan=nan)
            if inner is not None:
                return Origin(self._executions[inner], noticed_in)
            same = [one for one in execution.operands if _is(one, nan=nan)]
            if not same and nan:
                same = list(execution.operands)
                if same:
                    maker, nan = position, False
            if not same:
                return self._made(position, noticed_in, maker)
            writers = [self._writer(position, one.tensor, nan=nan) for one in same]
            found = [writer for writer in writers if writer is not None]
            if not found:
                return self._given(position, same[0].tensor, noticed_in, maker)
            position = min(found)

    def _made(self, position: int, noticed_in: int, maker: int | None) -> Origin:
        """Return the origin of a number that an op computed from good operands."""
        execution = self._executions[position]
        op = op_at(self._program, execution.path)[1]
        if maker is not None and _gives_infinity(op):
            # The infinity was asked for, as in a mask.
            result = execution.results[0].tensor
            return Origin(self._executions[maker], noticed_in, given_infinity=result)
        return Origin(execution, noticed_in)

    def _given(self, position: int, tensor: int, noticed_in: int, maker: int | None) -> Origin:
        """Return the origin of a number that came in with a tensor."""
        graph, _ = op_at(self._program, self._executions[position].path)
        if maker is not None and graph.root_of(tensor).role not in _NO_MASKS:
            # It may be a mask.
            return Origin(self._executions[maker], noticed_in, given_infinity=tensor)
        return Origin(self._executions[position], noticed_in, given=tensor)

    def _inside(self, position: int, *, nan: bool) -> int | None:
        """Return the first execution, in the bodies of an op, that computed a bad number."""
        outer = self._executions[position]
        length = len(outer.path)
        for inner in range(position):
            one = self._executions[inner]
            is_inside = one.path[:length] == outer.path and len(one.path) > length
            if not is_inside or one.number < outer.number:
                continue
            makes = any(_is(r, nan=nan) for r in one.results)
            if makes and not any(_is(o, nan=nan) for o in one.operands):
                return inner
        return None

    def _writer(self, position: int, tensor: int, *, nan: bool) -> int | None:
        """Return the last execution before another one that wrote a bad number to a tensor."""
        reader = self._executions[position]
        graph, _ = op_at(self._program, reader.path)
        root = graph.root_of(tensor)
        for earlier in range(position - 1, -1, -1):
            one = self._executions[earlier]
            if not self._may_write(one, reader, kept=root.kind == TensorKind.VARIABLE):
                continue
            for result in one.results:
                if graph.root_of(result.tensor).id == root.id and _is(result, nan=nan):
                    return earlier
        return None

    @staticmethod
    def _may_write(one: _native.BadExecution, reader: _native.BadExecution, *, kept: bool) -> bool:
        """Return whether an execution writes the memory that another one reads."""
        if one.path[:-1] != reader.path[:-1]:
            return False
        same = (one.iteration, one.micro_batch) == (reader.iteration, reader.micro_batch)
        return kept or (same and one.replica == reader.replica)


def _is(one: _native.BadTensor, *, nan: bool) -> bool:
    return one.nan if nan else one.infinity


def _gives_infinity(op: Op) -> bool:
    """Return whether an op has an infinite attribute."""
    return any(math.isinf(number) for number in _numbers(list(op.attributes.values())))


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, complex):
        yield from (value.real, value.imag)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item)
