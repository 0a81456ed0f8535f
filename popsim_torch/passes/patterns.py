"""Patterns of ops, and what takes their place: how passes that join ops are written.

A :class:`Rewrite` says which ops it looks for (:class:`OpPattern`), what else has to hold, and
which op is to stand where some of them were. :func:`rewrite` goes through a graph once, in the
order in which ops run, and applies rewrites wherever they fit.

Ops of a pattern are connected by tensors with names. A name stands for memory: an op may see it in
another shape (:class:`Operand`). What is ``inner`` belongs to the ops of the match alone: one of
them writes it, and nobody else reads it, so that it need not exist any more.
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
        name: The same name in another place of the pattern is the same memory.
        fits: Whether the op sees it as it has to.
    """

    name: str
    fits: Callable[[Match, Tensor], bool]


def operand(name: str) -> Operand:
    """Return an operand that may be seen in any way."""
    return Operand(name, lambda _match, _tensor: True)


def whole(name: str) -> Operand:
    """Return an operand that is all of its memory, element by element, perhaps in another shape."""
    return Operand(name, lambda match, seen: seen.covers(match.graph.root(seen)))


@dataclass(frozen=True)
class OpPattern:
    """An op to look for.

    Attributes:
        name: What the rewrite calls it.
        kind: Of the op.
        inputs: What it reads, by position; other inputs do not matter.
        among: Something it reads at a position that does not matter.
        output: What it writes as its first result; empty where that does not matter.
        where: What else has to hold for it.
        optional: It may be missing. If it has ``among`` and ``output``, these are one tensor then.
        given: It is looked for only where the op of this name was found.
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
        """Return what it reads at which position.

        Args:
            position: Of ``among``.
        """
        found = list(self.inputs.items())
        return found if self.among is None else [*found, (position, self.among)]


class Match:
    """Ops that a pattern fits.

    Attributes:
        graph: Has the ops.
        uses: Who reads and writes its tensors.
        ops: The ops, by their names in the pattern; those that are missing are not there.
        tensors: Id of the memory of each named tensor.
        positions: Where an op reads its ``among``, by the op's name.
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
        """Return the op that runs first of those that were found of these."""
        found = [self.ops[name] for name in names if name in self.ops]
        return min(found, key=self.uses.position)

    def run_together(self, *names: str) -> bool:
        """Whether the ops that were found of these have one phase and stage."""
        places = {(op.phase, op.stage) for name in names if (op := self.ops.get(name)) is not None}
        return len(places) <= 1


@dataclass(frozen=True)
class Pattern:
    """Ops to look for together.

    Attributes:
        seed: The op that the search begins at.
        others: The other ops, each connected with one in front of it.
        inner: Tensors that belong to the ops of the match alone.
        where: What else has to hold for the match.
    """

    seed: OpPattern
    others: Sequence[OpPattern]
    inner: Sequence[str]
    where: Callable[[Match], bool] = lambda _match: True


@dataclass(frozen=True)
class Rewrite:
    """A pattern and its replacement.

    Attributes:
        name: In the table of all rewrites.
        does: What it joins, and what for; a sentence for that table.
        pattern: What it looks for. Rewrites that follow each other may share one: it is looked for
            once.
        replace: Returns, by its name in the pattern, the op that stands in the place of one; all
            other ops of the match go. None: it turned out that the match will not do.
    """

    name: str
    does: str
    pattern: Pattern
    replace: Callable[[Match], Mapping[str, Op] | None]


def rewrite(graph: Graph, rewrites: Sequence[Rewrite]) -> int:
    """Apply rewrites to a graph, in place.

    Args:
        graph: Complete, returns included: a tensor that is copied to the host has a reader more.
            Names of tensors that are no longer computed stay in the graph.
        rewrites: Where several fit an op, the first one counts.

    Returns:
        The number of ops that are gone.
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
    """Return what the first rewrite that fits puts in the place of each op of its match."""
    for pattern, rewrites in groups:
        if pattern.seed.kind != op.kind:
            continue
        for match in _matches(pattern, Match(graph, uses), op):
            for one in rewrites:
                new = one.replace(match)
                if new is not None:
                    return [(old, new.get(name)) for name, old in match.ops.items()]
    return []


# --- The search: each step binds one op of the pattern, and takes it back when the rest fails ---


def _matches(one: Pattern, match: Match, seed: Op) -> Iterator[Match]:
    for _ in _bound(match, one.seed, seed):
        yield from _extended(one, match, 0)


def _extended(one: Pattern, match: Match, index: int) -> Iterator[Match]:
    """Yield the match with all others from this one on."""
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
    """Return the ops that a tensor which is bound already leads to."""
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
    """Bind an op and its tensors while the caller goes on, in each way that there is."""
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
    """Return all tensors that are bound with those that an op reads; None if it reads others."""
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
    """Go on without an op: what it would write is what it would read."""
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
    """Whether inner tensors are written once, and read by the ops of the match alone."""
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
