"""Recomputing forward values in the backward pass: which, where, and from which values."""

import pytest
import torch

from popsim_torch.ir import Graph, Origin, Phase, Tensor, TensorKind
from popsim_torch.passes.recompute import recompute
from popsim_torch.passes.recompute_choice import Recomputation
from tests.unit.passes.sketch import verify_sketch

F32 = torch.float32
FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD
NONE, STANDARD, NORM = Recomputation.NONE, Recomputation.STANDARD, Recomputation.NORM
PIPELINE, ALL = Recomputation.PIPELINE, Recomputation.ALL


class Program:
    """A graph that a test builds: forward ops, then backward ops that read their results."""

    def __init__(self):
        self.graph = Graph()
        self.stage = 0

    def tensor(self, kind=TensorKind.VALUE, shape=(4, 4), name="", dtype=F32) -> Tensor:
        return self.graph.add_tensor(kind, dtype, shape, name=name)

    def input(self, name="input"):
        return self.tensor(TensorKind.INPUT, name=name)

    def weight(self, name="weight", shape=(4, 4)):
        return self.tensor(TensorKind.VARIABLE, shape, name=name)

    def forward(self, kind, *inputs, name="", shape=(4, 4), dtype=F32):
        out = self.tensor(shape=shape, name=name, dtype=dtype)
        self.graph.add_op(kind, inputs, [out], phase=FORWARD, stage=self.stage, name=name or kind)
        return out

    def backward(self, *inputs, name="gradient", stage=0):
        out = self.tensor()
        self.graph.add_op("grad", inputs, [out], phase=BACKWARD, stage=stage, name=name)
        return out

    def linear(self, x, name=""):
        return self.forward("matmul", x, self.weight(f"{name}.weight"), name=name)

    def recompute(self, mode, *checkpoints) -> int:
        """Run the pass, which must leave a valid program that a second run does not change."""
        verify_sketch(self.graph)
        forward = [(op.kind, list(op.inputs)) for op in self.graph.ops if op.phase == FORWARD]
        count = recompute(self.graph, mode, {tensor.id for tensor in checkpoints})
        verify_sketch(self.graph)
        ops = list(self.graph.ops)
        assert recompute(self.graph, mode, {tensor.id for tensor in checkpoints}) == 0
        assert self.graph.ops == ops
        after = [(op.kind, list(op.inputs)) for op in ops if op.phase == FORWARD]
        assert after == forward
        return count

    def lines(self) -> list[str]:
        """Return the ops of the backward pass as ``name(names of the inputs)``."""
        names = [[] for _ in self.graph.tensors]
        for name, tensor_id in self.graph.names.items():
            names[tensor_id].append(name)
        return [
            f"{op.name}({', '.join(names[i][0] for i in op.inputs if i >= 0)})"
            for op in self.graph.ops
            if op.phase == BACKWARD
        ]


def chain(*, layers=3):
    """``input -> fc1 -> act1 -> fc2 -> ...``; backward reads each pair, the last one first."""
    program = Program()
    x = program.input()
    values = []
    for i in range(1, layers + 1):
        h = program.linear(x, f"fc{i}")
        x = program.forward("map", h, name=f"act{i}")
        values.append((h, x))
    for i in range(layers, 0, -1):
        program.backward(*values[i - 1], name=f"gradient {i}")
    return program, values


def test_none_changes_nothing():
    program, _ = chain()
    before = program.lines()
    assert program.recompute(NONE) == 0
    assert program.lines() == before


def test_all_rebuilds_everything_from_the_inputs():
    program, _ = chain(layers=2)
    assert program.recompute(ALL) == 4
    assert program.lines() == [
        "fc1__re(input, fc1.weight)",
        "act1__re(fc1__re)",
        "fc2__re(act1__re, fc2.weight)",
        "act2__re(fc2__re)",
        "gradient 2(fc2__re, act2__re)",
        "gradient 1(fc1__re, act1__re)",
    ]


def test_checkpoints_cut_into_segments_that_are_rebuilt_when_they_are_needed():
    program, values = chain()
    assert program.recompute(ALL, values[1][1]) == 5
    assert program.lines() == [
        "fc3__re(act2, fc3.weight)",
        "act3__re(fc3__re)",
        "gradient 3(fc3__re, act3__re)",
        "fc1__re(input, fc1.weight)",
        "act1__re(fc1__re)",
        "fc2__re(act1__re, fc2.weight)",
        "gradient 2(fc2__re, act2)",
        "gradient 1(fc1__re, act1__re)",
    ]


def test_the_last_stage_is_not_rebuilt_behind_the_last_checkpoint():
    program, values = chain()
    assert program.recompute(PIPELINE, values[1][1]) == 3
    assert program.lines()[0] == "gradient 3(fc3, act3)"
    assert program.lines()[-2:] == ["gradient 2(fc2__re, act2)", "gradient 1(fc1__re, act1__re)"]


def test_the_last_stage_without_a_checkpoint_stays():
    program, _ = chain()
    assert program.recompute(PIPELINE) == 0


def staged():
    """Two stages; the second one reads ``act1`` and also ``fc1``."""
    program = Program()
    fc1 = program.linear(program.input(), "fc1")
    act1 = program.forward("map", fc1, name="act1")
    program.stage = 1
    fc2 = program.linear(act1, "fc2")
    out = program.forward("map", fc2, fc1, name="out")
    program.backward(fc2, out, act1, fc1, stage=1, name="gradient 2")
    program.backward(fc1, act1, stage=0, name="gradient 1")
    return program


def test_a_stage_keeps_what_comes_from_another_one():
    program = staged()
    assert program.recompute(PIPELINE) == 2
    assert program.lines() == [
        "gradient 2(fc2, out, act1, fc1)",
        "fc1__re(input, fc1.weight)",
        "act1__re(fc1__re)",
        "gradient 1(fc1__re, act1__re)",
    ]


def test_all_keeps_what_comes_from_another_stage_too():
    program = staged()
    assert program.recompute(ALL) == 4
    assert program.lines()[:3] == [
        "fc2__re(act1, fc2.weight)",
        "out__re(fc2__re, fc1)",
        "gradient 2(fc2__re, out__re, act1, fc1)",
    ]
    assert [op.stage for op in program.graph.ops if op.phase == BACKWARD] == [1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("mode, rebuilt", [(PIPELINE, True), (ALL, False)], ids=str)
def test_random_numbers(mode, rebuilt):
    program = Program()
    mask = program.forward("random", name="mask")
    out = program.forward("map", program.input(), mask, name="out")
    program.stage = 1
    program.forward("map", out, name="end")
    program.backward(mask, out)
    program.recompute(mode)
    assert ("mask__re()" in program.lines()) == rebuilt
    assert "out__re" in program.graph.names


def test_what_reads_a_changed_buffer_stays():
    program = Program()
    buffer = program.weight("buffer")
    scaled = program.forward("map", program.input(), buffer, name="scaled")
    out = program.forward("map", scaled, name="out")
    whole = program.graph.add_view(buffer, buffer.shape, buffer.strides, 0)
    program.graph.add_op("copy", [out], [whole], phase=FORWARD, name="assign buffer")
    program.backward(scaled, out)
    assert program.recompute(ALL) == 1
    assert program.lines() == ["out__re(scaled)", "gradient(scaled, out__re)"]


def test_batch_norm_moves_its_running_statistics_once():
    program = Program()
    graph, x = program.graph, program.forward("map", program.input(), name="x")
    running = [program.weight(name, (4,)) for name in ("running_mean", "running_variance")]
    results = [program.tensor(shape=(4,), name=f"result {i}") for i in range(5)]
    graph.add_op("batch_norm_statistics", [x, None, *running], results, phase=FORWARD, name="norm")
    for result, variable in zip(results[3:], running, strict=True):
        whole = graph.add_view(variable, (4,), (1,), 0)
        graph.add_op("copy", [result], [whole], phase=FORWARD, name="assign")
    program.backward(results[0], results[1])
    assert program.recompute(ALL) == 2
    again = next(op for op in graph.ops if op.name == "norm__re")
    assert [i < 0 for i in again.inputs] == [False, True, True, True]
    assert [i < 0 for i in again.outputs] == [False, False, False, True, True]
    assert "result 3__re" not in graph.names


def test_prints_are_not_repeated():
    program = Program()
    x = program.forward("map", program.input(), name="x")
    seen = program.graph.add_view(x, x.shape, x.strides, 0)
    program.graph.set_name(seen, "seen")
    program.graph.add_op("print", [x], [seen], phase=FORWARD, name="print")
    out = program.forward("map", seen, name="out")
    program.backward(seen, out)
    assert program.recompute(ALL) == 2
    assert program.lines() == ["x__re(input)", "out__re(seen__re)", "gradient(seen__re, out__re)"]


def test_copies_have_the_names_and_views_of_what_they_copy():
    program = Program()
    graph, x = program.graph, program.forward("map", program.input(), name="x")
    turned = graph.add_view(x, (2, 4), (1, 4), 2)
    graph.set_name(turned, "turned")
    graph.set_name(turned, "also turned")
    program.backward(x)
    program.recompute(ALL)
    copy = graph.tensors[graph.names["turned__re"]]
    assert graph.names["also turned__re"] == copy.id
    assert graph.root(copy).id == graph.names["x__re"]
    assert (copy.shape, copy.strides, copy.offset) == ((2, 4), (1, 4), 2)


def test_a_name_that_is_taken_stays_where_it_is():
    program = Program()
    taken = program.weight("x__re")
    program.backward(program.forward("map", program.input(), name="x"))
    assert program.recompute(ALL) == 1
    assert program.graph.names["x__re"] == taken.id


def test_what_is_updated_behind_the_backward_pass_reads_the_kept_value():
    program = Program()
    x = program.forward("map", program.input(), name="x")
    program.graph.add_op("sgd", [x], [], phase=Phase.UPDATE, name="update")
    assert program.recompute(ALL) == 0


# Standard and norms


def test_standard_rebuilds_what_follows_from_values_that_are_kept_anyway():
    """As for gelu: its gradient reads the input, and that of the next product the output."""
    program, _ = chain(layers=2)
    assert program.recompute(STANDARD) == 2
    assert program.lines() == [
        "act2__re(fc2)",
        "gradient 2(fc2, act2__re)",
        "act1__re(fc1)",
        "gradient 1(fc1, act1__re)",
    ]


def test_standard_keeps_what_would_cost_as_much_in_exchange():
    """As for relu: no op reads the input."""
    program = Program()
    out = program.forward("map", program.linear(program.input(), "fc"), name="relu")
    program.backward(out)
    assert program.recompute(STANDARD) == 0


def test_standard_keeps_a_small_value_for_a_large_one():
    program = Program()
    row = program.forward("matmul", program.input(), shape=(1, 4), name="row")
    program.backward(program.forward("map", row, name="wide"))
    assert program.recompute(STANDARD) == 1
    assert program.lines() == ["wide__re(row)", "gradient(wide__re)"]


def test_what_is_computed_before_the_first_run_costs_nothing():
    program = Program()
    ready = program.tensor(name="ready")
    program.graph.add_op("map", [], [ready], phase=Phase.SETUP, name="ready")
    program.backward(program.forward("map", program.input(), ready, name="out"))
    assert program.recompute(STANDARD) == 1
    assert program.lines() == ["out__re(input, ready)", "gradient(out__re)"]


@pytest.mark.parametrize(
    "kind",
    ["aten", "average_pool", "convolution", "matmul", "max_pool", "random", "recurrent", "reduce"],
)
def test_standard_keeps_what_is_not_cheap(kind):
    program = Program()
    program.backward(program.forward(kind, program.input()))
    assert program.recompute(STANDARD) == 0


@pytest.mark.parametrize(
    "kind", ["cat", "copy", "embedding", "group_norm", "layer_norm", "map", "softmax"]
)
def test_standard_rebuilds_what_is_cheap(kind):
    program = Program()
    program.backward(program.forward(kind, program.input()))
    assert program.recompute(STANDARD) == 1


def test_standard_goes_through_values_that_backward_does_not_read():
    program = Program()
    x = program.linear(program.input(), "fc")
    inner = program.forward("map", program.forward("map", x, name="a"), name="b")
    program.backward(x, program.forward("map", inner, name="c"))
    assert program.recompute(STANDARD) == 3
    assert program.lines() == ["a__re(fc)", "b__re(a__re)", "c__re(b__re)", "gradient(fc, c__re)"]


def test_standard_keeps_every_other_sum_of_a_residual_network():
    """All sums follow from the first one, but then all of them would be alive at once."""
    program = Program()
    x = program.linear(program.input(), "fc")
    sums, branches = [x], []
    for i in range(4):
        branches.append(program.linear(sums[-1], f"branch{i}"))
        sums.append(program.forward("map", sums[-1], branches[-1], name=f"sum{i}"))
    for branch, total in zip(branches[::-1], sums[:0:-1], strict=True):
        program.backward(branch, total)
    assert program.recompute(STANDARD) == 2
    copies = [line for line in program.lines() if "__re(" in line]
    assert copies == ["sum3__re(sum2, branch3)", "sum1__re(sum0, branch1)"]


def test_standard_keeps_checkpoints():
    program, values = chain(layers=2)
    assert program.recompute(STANDARD, values[0][1]) == 1
    assert program.lines()[-1] == "gradient 1(fc1, act1)"


def test_norms_and_what_is_directly_behind_them():
    program = Program()
    x = program.linear(program.input(), "fc")
    norm = program.forward("layer_norm", x, name="norm")
    after = program.forward("map", norm, name="after")
    further = program.forward("map", after, name="further")
    other = program.forward("map", x, name="other")
    program.backward(x, norm, after, further, other)
    assert program.recompute(NORM) == 2
    assert program.lines() == [
        "norm__re(fc)",
        "after__re(norm__re)",
        "gradient(fc, norm__re, after__re, further, other)",
    ]


def test_batch_norm_is_a_norm():
    program = Program()
    graph, x = program.graph, program.linear(program.input(), "fc")
    results = [program.tensor(shape=(4,), name=n) for n in ("mean", "deviation", "scale")]
    outputs = [*results, None, None]
    graph.add_op("batch_norm_statistics", [x, None, None, None], outputs, phase=FORWARD)
    norm = program.forward("map", x, results[0], results[2], name="norm")
    relu = program.forward("map", norm, name="relu")
    further = program.forward("map", relu, name="further")
    program.backward(x, results[0], results[1], relu, further)
    assert program.recompute(NORM) == 2
    assert program.lines() == [
        "norm__re(fc, mean, scale)",
        "relu__re(norm__re)",
        "gradient(fc, mean, deviation, relu__re, further)",
    ]


# Regions


def chain_in_regions(*, layers=3):
    """Return a chain in which each layer except the last one is a separate region."""
    program, values = chain(layers=layers)
    for op in program.graph.ops:
        number = int(op.name[-1])
        if op.phase == FORWARD and number < layers:
            op.origin = Origin(region=number)
    return program, values


def test_what_stays_inside_of_a_region_is_rebuilt_in_any_mode_and_what_leaves_it_is_kept():
    program, _ = chain_in_regions()
    assert program.recompute(NONE) == 2
    assert program.lines() == [
        "gradient 3(fc3, act3)",
        "fc2__re(act1, fc2.weight)",
        "gradient 2(fc2__re, act2)",
        "fc1__re(input, fc1.weight)",
        "gradient 1(fc1__re, act1)",
    ]


def test_one_region_of_two_layers_is_rebuilt_as_a_whole():
    program, _ = chain_in_regions()
    for op in program.graph.ops:
        if op.origin.region:
            op.origin = Origin(region=1)
    assert program.recompute(NONE) == 3
    assert program.lines() == [
        "gradient 3(fc3, act3)",
        "fc1__re(input, fc1.weight)",
        "act1__re(fc1__re)",
        "fc2__re(act1__re, fc2.weight)",
        "gradient 2(fc2__re, act2)",
        "gradient 1(fc1__re, act1__re)",
    ]


def test_a_checkpoint_inside_of_a_region_is_kept():
    program, values = chain_in_regions()
    assert program.recompute(NONE, values[0][0]) == 1
    assert "gradient 1(fc1, act1)" in program.lines()


def test_a_mode_rebuilds_what_no_region_does():
    program, _ = chain_in_regions()
    assert program.recompute(ALL) == 6
