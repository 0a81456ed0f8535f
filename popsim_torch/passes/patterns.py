"""Patterns of ops and their replacements: the language of passes that fuse ops.

A :class:`Rewrite` has the ops to find (:class:`OpPattern`), further conditions, and the op that
replaces some of them. :func:`rewrite` goes through a graph once, in the order of execution, and
applies rewrites wherever they match.

Ops of a pattern are connected by tensors with names. A name stands for memory: an op may read it in
another shape (:class:`Operand`). An ``inner`` tensor belongs only to the ops of the match: one of
them writes it, and no other op reads it, so the tensor may disappear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from popsim_torch.ir import Graph, Op, Tensor, TensorKind, Uses
from popsim_torch.ir.graph import NO_TENSOR

__all__ = ["Match", "OpPattern", "Operand", "Pattern", "Rewrite", "operand", "rewrite", "whole"]


@dataclass(frozen=True)
class Operand:
    """A tensor that an op of a pattern reads.

    Attributes:
        name: Operands with the same name in a pattern have the same memory.
        fits: Returns whether the op reads the memory in the required form.
    """

    name: str
    fits: Callable[[Match, Tensor], bool]


def operand(name: str) -> Operand:
    """Return an operand that may be read in any form."""
    return Operand(name, lambda _match, _tensor: True)


def whole(name: str) -> Operand:
    """Return an operand that is its whole memory, in order, maybe in another shape."""
    return Operand(name, lambda match, seen: seen.covers(match.graph.root(seen)))


@dataclass(frozen=True)
class OpPattern:
    """An op to find.

    Attributes:
        name: The name of the op in the rewrite.
        kind: The kind of the op.
        inputs: Its inputs, by position; other inputs may be anything.
        among: An input at any position.
        output: Its first result; empty if it may be anything.
        where: Returns whether the op fulfils further conditions.
        optional: Whether it may be missing. Then ``among`` and ``output``, if set, are one tensor.
        given: The op is searched for only if the op with this name was found.
    """

    name: str
    kind: str
    inputs: Mapping[int, Operand] = field(default_factory=dict)
    among: Operand | None = None
    output: str = ""
    where: Callable[[Match, Op], bool] = lambda _match, _op: True
    optional: bool = False
    given: str = ""

    def reads(self, position: int) -> list[tuple[int, Operand]]:
        """Return its operands and their positions.

        Args:
            position: The position of ``among``.
        """
        found = list(self.inputs.items())
        return found if self.among is None else [*found, (position, self.among)]


class Match:
    """Ops that match a pattern.

    Attributes:
        graph: The graph of the ops.
        uses: The readers and writers of its tensors.
        ops: The ops, by their names in the pattern; missing ones have no entry.
        tensors: Id of the memory of each named tensor.
        positions: The position at which an op reads its ``among``, by the op's name.
    """

    def __init__(self, graph: Graph, uses: Uses) -> None:
        self.graph = graph
        self.uses = uses
        self.ops: dict[str, Op] = {}
        self.tensors: dict[str, int] = {}
        self.positions: dict[str, int] = {}

    def tensor(self, tensor_id: int) -> Tensor:
        """Return a tensor of the graph."""
        return self.graph.tensors[tensor_id]

    def root(self, tensor_id: int) -> Tensor:
        """Return the tensor that owns the memory of another one."""
        return self.graph.root_of(tensor_id)

    def first(self, *names: str) -> Op:
        """Return the first op to run among the found ops with these names."""
        found = [self.ops[name] for name in names if name in self.ops]
        return min(found, key=self.uses.position)

    def run_together(self, *names: str) -> bool:
        """Return whether the found ops with these names have one phase and stage."""
        places = {(op.phase, op.stage) for name in names if (op := self.ops.get(name)) is not None}
        return len(places) <= 1


@dataclass(frozen=True)
class Pattern:
    """Ops to find together.

    Attributes:
        seed: The op at which the search begins.
        others: The other ops, each connected with one before it.
        inner: Tensors that belong only to the ops of the match.
        where: Returns whether the match fulfils further conditions.
    """

    seed: OpPattern
    others: Sequence[OpPattern]
    inner: Sequence[str]
    where: Callable[[Match], bool] = lambda _match: True


@dataclass(frozen=True)
class Rewrite:
    """A pattern and its replacement.

    Attributes:
        name: The name in the table of all rewrites.
        does: The change and its purpose; a sentence for that table.
        pattern: The ops to find. Consecutive rewrites may share a pattern: it is searched for once.
        replace: Returns the replacements by the names of the replaced ops in the pattern; all other
            ops of the match are removed. None if the match turns out not to be suitable.
    """

    name: str
    does: str
    pattern: Pattern
    replace: Callable[[Match], Mapping[str, Op] | None]


def rewrite(graph: Graph, rewrites: Sequence[Rewrite]) -> int:
    """Apply rewrites to a graph, in place.

    Args:
        graph: The complete graph, with returns: a tensor that is copied to the host has one more
            reader. Names of tensors that are no longer computed stay in the graph.
        rewrites: If several match an op, the first one is used.

    Returns:
        The number of ops that were removed.
    """
    groups = [(p, list(group)) for p, group in groupby(rewrites, lambda one: one.pattern)]
    kinds = {pattern.seed.kind for pattern, _ in groups}
    seeds = [place for place, op in enumerate(graph.ops) if op.kind in kinds]
    if not seeds:
        return 0
    uses = Uses(graph)
    ops: list[Op | None] = list(graph.ops)
    for place in seeds:
        while (op := ops[place]) is not None:
            changes = _first_fitting(graph, uses, groups, op)
            if not changes:
                break
            for old, new in changes:
                ops[uses.position(old)] = new
                uses.replace(old, new)
    before = len(graph.ops)
    graph.ops = [op for op in ops if op is not None]
    return before - len(graph.ops)


def _first_fitting(
    graph: Graph, uses: Uses, groups: Sequence[tuple[Pattern, Sequence[Rewrite]]], op: Op
) -> list[tuple[Op, Op | None]]:
    """Return the replacements of the first rewrite that matches."""
    for pattern, rewrites in groups:
        if pattern.seed.kind != op.kind:
            continue
        for match in _matches(pattern, Match(graph, uses), op):
            for one in rewrites:
                new = one.replace(match)
                if new is not None:
                    return [(old, new.get(name)) for name, old in match.ops.items()]
    return []


# --- The search: each step binds one op of the pattern, and unbinds it if the rest fails ---


def _matches(one: Pattern, match: Match, seed: Op) -> Iterator[Match]:
    for _ in _bound(match, one.seed, seed):
        yield from _extended(one, match, 0)


def _extended(one: Pattern, match: Match, index: int) -> Iterator[Match]:
    """Yield the match with all other ops from this index on."""
    if index == len(one.others):
        if _is_closed(one, match) and one.where(match):
            yield match
        return
    pattern = one.others[index]
    if pattern.given and pattern.given not in match.ops:
        yield from _extended(one, match, index + 1)
        return
    for candidate in _candidates(match, pattern):
        for _ in _bound(match, pattern, candidate):
            yield from _extended(one, match, index + 1)
    if pattern.optional:
        for _ in _bridged(match, pattern):
            yield from _extended(one, match, index + 1)


def _candidates(match: Match, pattern: OpPattern) -> list[Op]:
    """Return the ops that are connected with a bound tensor."""
    writers = match.tensors.get(pattern.output)
    if writers is not None:
        found = match.uses.writers(writers)
    else:
        names = [operand.name for _, operand in pattern.reads(-1)]
        known = [match.tensors[name] for name in names if name in match.tensors]
        found = match.uses.readers(known[0]) if known else ()
    taken = {id(op) for op in match.ops.values()}
    each = {id(op): op for op in found if op.kind == pattern.kind and id(op) not in taken}
    return list(each.values())


def _bound(match: Match, pattern: OpPattern, op: Op) -> Iterator[None]:
    """Bind an op and its tensors while the caller continues, in every possible way."""
    before = match.tensors
    for position in range(len(op.inputs)) if pattern.among else (-1,):
        tensors = _read_tensors(match, pattern, op, position)
        if tensors is None:
            continue
        if pattern.output:
            written = op.outputs[0]
            root = NO_TENSOR if written == NO_TENSOR else match.graph.root_of(written).id
            if root == NO_TENSOR or tensors.setdefault(pattern.output, root) != root:
                continue
        match.ops[pattern.name], match.positions[pattern.name] = op, position
        match.tensors = tensors
        if pattern.where(match, op):
            yield
        match.tensors = before
        del match.ops[pattern.name], match.positions[pattern.name]


def _read_tensors(match: Match, pattern: OpPattern, op: Op, position: int) -> dict[str, int] | None:
    """Return all bound tensors with those that an op reads; None if it reads other tensors."""
    graph, found = match.graph, dict(match.tensors)
    for place, asked in pattern.reads(position):
        if place >= len(op.inputs) or op.inputs[place] == NO_TENSOR:
            return None
        seen = graph.tensors[op.inputs[place]]
        root = graph.root(seen).id
        if found.setdefault(asked.name, root) != root or not asked.fits(match, seen):
            return None
    return found


def _bridged(match: Match, pattern: OpPattern) -> Iterator[None]:
    """Continue without an op: its output is its input."""
    if pattern.among is None or not pattern.output:
        yield
        return
    before, names = match.tensors, (pattern.among.name, pattern.output)
    known = {before[name] for name in names if name in before}
    if len(known) == 1:
        match.tensors = before | dict.fromkeys(names, known.pop())
        yield
        match.tensors = before


def _is_closed(one: Pattern, match: Match) -> bool:
    """Return whether inner tensors are written once, and read only by the ops of the match."""
    reads: Counter[int] = Counter()
    for pattern in (one.seed, *one.others):
        if pattern.name in match.ops:
            reads.update(match.tensors[operand.name] for _, operand in pattern.reads(-1))
    return all(
        match.graph.tensors[root].kind == TensorKind.VALUE
        and len(match.uses.writers(root)) == 1
        and len(match.uses.readers(root)) == reads[root]
        for root in {match.tensors[name] for name in one.inner if name in match.tensors}
    )
