"""Places of tensors in the arena: without conflicts, and known before any allocation."""

import itertools
import random

import pytest
import torch

from popsim_torch import _native, ir
from popsim_torch.ir import Phase, TensorKind
from popsim_torch.passes.native_graph import to_native

ALIGNMENT = 64  # bytes


def random_program(seed, num_stages=1):
    """Return a graph of copies (which may not write over their input) and maps (which may)."""
    rng = random.Random(seed)
    graph = ir.Graph()
    sizes = (0, 1, 16, 17, 100, 1000)
    inputs = [graph.add_tensor(TensorKind.INPUT, torch.float32, (size,)) for size in sizes]
    made = [[x] for x in inputs]  # by size
    phases = [Phase.FORWARD] * num_stages + [Phase.BACKWARD] * num_stages
    stages = [*range(num_stages), *reversed(range(num_stages))]
    for (phase, stage), _ in itertools.product(
        zip(phases, stages, strict=True), range(24 // num_stages)
    ):
        known = rng.choice(made)
        source = rng.choice(known[-4:])
        out = graph.add_tensor(TensorKind.VALUE, torch.float32, source.shape)
        known.append(out)
        kind, attributes = "copy", {}
        if rng.random() < 0.6:
            kind = "map"
            attributes = {
                "code": ["neg 0"],
                "constants": [],
                "results": [1],
                "dtypes": ["float32"],
                "shape": list(source.shape),
            }
        graph.add_op(kind, [source], [out], attributes, phase=phase, stage=stage)
    return graph


def plan_of(graph, accumulation, schedule):
    config = _native.RunConfig(1, accumulation, True, schedule)
    with _native.translated_errors():
        return _native.Plan(to_native(graph), config)


def check(graph, plan):
    """Check that no two tensors are in the same bytes at the same step."""
    ranges = plan.arena_ranges()
    for place in ranges:
        size = graph.tensors[place.tensor].numel * 4
        assert place.offset % ALIGNMENT == 0
        assert place.slot_bytes % ALIGNMENT == 0
        assert place.slot_bytes >= size
        assert 0 <= place.offset <= plan.arena_bytes - place.slot_bytes * place.num_slots
        assert place.first_step <= place.last_step
    for a, b in itertools.combinations(ranges, 2):
        apart = (
            a.offset + a.slot_bytes * a.num_slots <= b.offset
            or b.offset + b.slot_bytes * b.num_slots <= a.offset
        )
        begin, end = max(a.first_step, b.first_step), min(a.last_step, b.last_step)
        # The op that reads one tensor last may write the other one over it.
        taken_over = begin == end and a.offset == b.offset and a.num_slots == b.num_slots == 1
        assert apart or begin > end or (taken_over and a.first_step != b.first_step)
    written = {graph.root(graph.tensors[i]).id for op in graph.ops for i in op.outputs}
    assert {place.tensor for place in ranges} == written


@pytest.mark.parametrize("seed", range(40))
def test_tensors_that_live_together_lie_apart(seed):
    graph = random_program(seed)
    plan = plan_of(graph, 1, "sequential")
    check(graph, plan)
    assert plan.peak_live_bytes <= plan.arena_bytes


@pytest.mark.parametrize("seed", range(20))
def test_stashed_tensors_lie_apart(seed):
    graph = random_program(seed, num_stages=3)
    plan = plan_of(graph, 8, "pipelined")
    check(graph, plan)
    slots = {place.num_slots for place in plan.arena_ranges()}
    assert max(slots) > 1


def test_some_results_are_written_over_their_inputs():
    """Otherwise the tests above would show nothing about overwriting."""
    shared = 0
    for seed in range(40):
        places = plan_of(random_program(seed), 1, "sequential").arena_ranges()
        shared += sum(
            a.offset == b.offset and a.slot_bytes > 0 and a.last_step == b.first_step
            for a, b in itertools.permutations(places, 2)
        )
    assert shared > 40


def test_a_plan_of_a_program_that_fits_nowhere():
    """Two results of four tebibytes are alive at the same time."""
    graph = ir.Graph()
    shape = (1 << 40,)
    tensor = graph.add_tensor(TensorKind.INPUT, torch.float32, shape)
    weight = graph.add_tensor(TensorKind.VARIABLE, torch.float32, shape)
    for source in (tensor, weight):
        previous = source
        for _ in range(3):
            out = graph.add_tensor(TensorKind.VALUE, torch.float32, shape)
            graph.add_op("copy", [previous], [out], phase=Phase.FORWARD)
            previous = out
    plan = plan_of(graph, 1, "sequential")
    assert plan.arena_bytes == plan.peak_live_bytes == 2 * 4 << 40
    assert plan.persistent_bytes == 4 << 40
