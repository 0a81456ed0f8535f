"""Spoilt programs are refused, or are other programs that run: none does what it may not.

What is refused after a pass, the device's library refuses before it prepares a kernel as well:
passes that fit a program to the host come in between.

``make test-asan`` runs the same under AddressSanitizer, where a kernel may touch the operands of
its op alone.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from popsim_torch import _native, ir
from popsim_torch.errors import Error, InternalError
from popsim_torch.executor.build import build_executable
from popsim_torch.ir import Graph, TensorKind, graphs, walk_all
from popsim_torch.passes.op_table import op_table
from popsim_torch.passes.verify import verify
from tests.mutants.mutations import MUTATIONS, clone, other_attribute
from tests.mutants.programs import PROGRAMS, Compiled, program

FEW, MANY = 2, 14  # of each mutation of each program
SHARES = {other_attribute: 2}  # There are many kinds of attributes.


def mutants(good: Graph, seed: str, count: int) -> Iterator[tuple[str, str, Graph]]:
    """Yield mutation, description and graph: no two alike, and none like the good one."""
    seen = {as_text(good)}
    for mutation in MUTATIONS:
        random = Random(f"{seed} {mutation.__name__}")
        wanted = len(seen) + SHARES.get(mutation, 1) * count
        for _ in range(10 * count):
            graph = clone(good)
            description = mutation(random.choice([*graphs(graph)]), random)
            if description is not None and (text := as_text(graph)) not in seen:
                seen.add(text)
                yield mutation.__name__, description, graph
            if len(seen) == wanted:
                break


def as_text(graph: Graph) -> str:
    ops = [(replace(op, bodies=[]), *map(as_text, op.bodies)) for op in graph.ops]
    return repr((ops, [replace(tensor, value=None) for tensor in graph.tensors]))


def runs_for_ever(graph: Graph) -> bool:
    counts = [op.attributes.get("count", 0) for _, op in walk_all(graph) if op.kind == "loop"]
    return any(isinstance(count, int) and count > 1000 for count in counts)


def fill(tensor: ir.Tensor) -> torch.Tensor:
    if tensor.dtype.is_floating_point:
        return torch.rand(tensor.shape).to(tensor.dtype)
    return torch.randint(0, 2, tensor.shape).to(tensor.dtype)


def fate(good: Compiled, graph: Graph) -> str:
    """Return what becomes of a program."""
    problem = problem_found(graph)
    changed = replace(good.program, graph=graph)
    try:
        executable = build_executable(
            changed, good.loop, training=good.training, schedule=good.schedule
        )
    except InternalError:
        return "refused as it is prepared" if problem is None else "refused after a pass"
    if problem is not None:
        # C++ does not know the names by which a user finds tensors.
        assert "that is named" in problem, f"not refused as it is prepared: {problem}"
        return "refused after a pass"
    if runs_for_ever(graph):
        return "would run for ever"
    for tensor in graph.tensors:
        if tensor.kind == TensorKind.VARIABLE:
            executable.write(tensor.id, fill(tensor))
    count = good.loop.device_iterations * good.loop.gradient_accumulation
    inputs = [
        fill(replace(tensor, shape=(count * math.prod(tensor.shape),)))
        for tensor in graph.tensors
        if tensor.kind == TensorKind.INPUT
    ]
    try:
        with _native.translated_errors():
            connect(executable, good.program.graph, len(inputs))
    except Error:
        return "refused by its queues"
    try:
        with _native.translated_errors():
            for _ in range(2):
                executable.run(inputs, functools.partial(host, graph))
    except Error as error:
        # Two calls of the host that are told apart by an attribute: it answers for the other one.
        if "(host_call, " in str(error) and " results instead of " in str(error):
            return "refused as the host answers"
        if "(within): " in str(error):  # other bounds, or another operand
            return "refused by its own check as it runs"
        # Without data PyTorch looks at less: at no axis of ``sort``, at no index.
        if isinstance(error, InternalError) or " (aten, " not in str(error):
            raise
        return "refused by PyTorch's operator as it runs"
    return "runs"


def connect(executable: _native.Executable, good: Graph, num_inputs: int) -> None:
    """Connect a program with the queues of the good one."""
    queues: dict[Any, _native.Outlet] = {}
    for _, op in walk_all(good):
        if op.kind == "enqueue":
            dtypes: Any = op.attributes["dtypes"]
            shapes = [good.tensors[i].shape for i in op.inputs]
            number = op.attributes["queue"]
            queues[number] = _native.Outfeed(
                dtypes, shapes, False, 1, 2, -1, "wait", 60.0, "", "it"
            )
    if queues:
        outlets = [queues[number] for number in sorted(queues)]
        executable.connect(outlets, [], [_native.InputPlace()] * num_inputs)


def host(
    graph: Graph, number: int, gradient: bool, tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return for a call of the host what its op says of its results."""
    op = next(
        op
        for op in graph.ops
        if (op.attributes.get("call"), op.attributes.get("gradient")) == (number, gradient)
    )
    sizes: Any = op.attributes["sizes"]
    results = []
    for dtype, rank in zip(op.attributes["dtypes"], op.attributes["ranks"], strict=True):
        shape, sizes = sizes[:rank], sizes[rank:]
        results.append(torch.ones(shape, dtype=getattr(torch, dtype)))
    return results


def problem_found(graph: Graph) -> str | None:
    """Return what the verifier says of a graph, as after a pass."""
    try:
        verify(graph)
    except InternalError as error:
        return str(error)
    return None


def test_the_programs_use_every_op():
    used = {op.kind for name in PROGRAMS for _, op in walk_all(program(name).program.graph)}
    assert sorted(set(op_table()) - used) == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_programs_are_good(name, capfd):
    good = program(name)
    assert fate(good, clone(good.program.graph)) == "runs"


@pytest.mark.parametrize(
    "name, kind, counter",
    [
        ("attention", "attention_grad", "num_others"),
        ("recurrent", "sgd_combined_update", "parameters"),
    ],
)
def test_what_counts_operands_takes_no_memory(name, kind, counter):
    good = program(name)
    graph = clone(good.program.graph)
    op = next(op for op in graph.ops if op.kind == kind)
    assert counter in op.attributes
    op.attributes[counter] = 2**40
    assert fate(good, graph) == "refused after a pass"


def check(name: str, count: int) -> str:
    good = program(name)
    fates: Counter[str] = Counter()
    for mutation, description, graph in mutants(good.program.graph, name, count):
        try:
            fates[fate(good, graph)] += 1
        except Exception as error:
            raise AssertionError(f"{name}, {mutation}: {description}") from error
    total = sum(fates.values())
    assert fates["refused after a pass"] > 0.4 * total
    assert fates["runs"] < 0.25 * total
    return f"{name}: {total} mutants, {dict(sorted(fates.items()))}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_mutants(name, capfd):
    check(name, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_many_mutants(name, capfd):
    fates = check(name, MANY)
    with capfd.disabled():
        print(fates)
