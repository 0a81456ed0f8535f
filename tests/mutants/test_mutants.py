"""Spoilt programs are refused, or are other programs that run: none does what it may not.

``make test-asan`` runs the same under AddressSanitizer, where a kernel may touch the operands of
its op alone.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
import torch

from popsim_torch import ir
from popsim_torch.errors import InternalError
from popsim_torch.executor.build import build_executable
from popsim_torch.ir import Graph, TensorKind
from popsim_torch.passes.op_table import op_table
from tests.mutants.mutations import MUTATIONS, clone
from tests.mutants.programs import PROGRAMS, Compiled, program

FEW, MANY = 2, 14  # of each mutation of each program


def mutants(good: Graph, seed: str, count: int) -> Iterator[tuple[str, str, Graph]]:
    """Yield mutation, description and graph."""
    for mutation in MUTATIONS:
        random = Random(f"{seed} {mutation.__name__}")
        made = 0
        for _ in range(3 * count):
            graph = clone(good)
            description = mutation(graph, random)
            if description is not None and made < count:
                made += 1
                yield mutation.__name__, description, graph


def fill(tensor: ir.Tensor) -> torch.Tensor:
    if tensor.dtype.is_floating_point:
        return torch.rand(tensor.shape).to(tensor.dtype)
    return torch.randint(0, 2, tensor.shape).to(tensor.dtype)


def fate(good: Compiled, graph: Graph) -> str:
    """Return what becomes of a program."""
    try:
        ir.verify(graph, op_table())
    except InternalError:
        return "refused in Python"
    changed = replace(good.program, graph=graph)
    try:
        executable = build_executable(
            changed, good.loop, training=good.training, schedule=good.schedule
        )
    except InternalError:
        return "refused in C++"
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
        executable.run(inputs)
        executable.run(inputs)
    except Exception as error:
        return "stopped" if "while running" in str(error) else "stopped by C++"
    return "runs"


def test_the_programs_use_every_op():
    used = {op.kind for name in PROGRAMS for op in program(name).program.graph.ops}
    assert sorted(set(op_table()) - used) == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_programs_are_good(name, capfd):
    good = program(name)
    assert fate(good, clone(good.program.graph)) == "runs"


def check(name: str, count: int) -> None:
    good = program(name)
    fates = Counter(fate(good, graph) for _, _, graph in mutants(good.program.graph, name, count))
    print(f"{name}: {sum(fates.values())} mutants, {dict(fates)}")
    refused = fates["refused in Python"] + fates["refused in C++"]
    assert refused > 0.75 * sum(fates.values())
    assert fates["refused in Python"] > 0
    assert fates["refused in C++"] > 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_mutants(name, capfd):
    check(name, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_many_mutants(name, capfd):
    check(name, MANY)
    with capfd.disabled():
        print(capfd.readouterr().out)
