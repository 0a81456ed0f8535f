"""The op that copies a tensor to the host: which entry of a return a micro-batch goes to."""

import itertools

import pytest
import torch

from popsim_torch import _native, ir
from popsim_torch.anchors import kept_micro_batches, num_returned
from popsim_torch.enums import OutputMode
from popsim_torch.errors import InternalError
from popsim_torch.passes.native_graph import to_native


def anchored(mode, period=1, dtype="float32", buffer=0, phase=ir.Phase.FORWARD, times=1):
    """Return a program that copies its input, of one element, to a return."""
    graph = ir.Graph()
    x = graph.add_tensor(ir.TensorKind.INPUT, torch.float32, (1,))
    attributes = {
        "mode": mode,
        "period": period,
        "buffer": buffer,
        "per_update": False,
        "dtype": dtype,
    }
    for _ in range(times):
        graph.add_op("anchor", [x], [], attributes, phase=phase)
    return to_native(graph)


def run(graph, iterations, accumulation, num_entries):
    """Run 0, 1, 2, ... through a program as so many device iterations and accumulation steps."""
    config = _native.RunConfig(iterations, accumulation, True, "sequential")
    returned = _native.ReturnSpec([num_entries], "float32", False)
    with _native.translated_errors():
        executable = _native.Executable(graph, config, [returned])
        executable.load()
        return executable.run([torch.arange(float(iterations * accumulation))])[0].tolist()


@pytest.mark.parametrize(
    "mode, period, expected",
    [
        ("All", 1, {(1, 1): [0], (2, 3): [0, 1, 2, 3, 4, 5], (4, 1): [0, 1, 2, 3]}),
        ("EveryN", 2, {(2, 3): [3, 4, 5], (4, 1): [1, 3]}),
        ("Final", 1, {(1, 1): [0], (2, 3): [5], (4, 1): [3]}),
        ("Sum", 1, {(1, 1): [0], (2, 3): [15], (4, 1): [6]}),
    ],
)
def test_one_program_serves_every_loop_count(mode, period, expected):
    for counts, values in expected.items():
        assert run(anchored(mode, period), *counts, len(values)) == values


@pytest.mark.parametrize("mode", [m for m in OutputMode if m != OutputMode.Default])
def test_the_device_keeps_what_the_rule_of_python_says(mode):
    for iterations, accumulation, period in itertools.product((1, 2, 4), (1, 3), (1, 2, 3, 4)):
        # One that is longer than the run takes its value in a later one.
        if period > iterations:
            continue
        kept = kept_micro_batches(mode, period, iterations, accumulation)
        expected = [i * accumulation + step for i in kept[0] for step in kept[1]]
        if mode == OutputMode.Sum:
            expected = [sum(range(iterations * accumulation))]
        count = num_returned(mode, period, iterations, accumulation, 1, any_period=True)
        assert count == len(expected)
        graph = anchored(mode.name, period)
        assert run(graph, iterations, accumulation, len(expected)) == expected


@pytest.mark.parametrize("mode, num_entries", [("All", 5), ("All", 7), ("Final", 0), ("Sum", 2)])
def test_a_return_of_another_size_is_refused(mode, num_entries):
    with pytest.raises(InternalError, match=rf"elements of float32 .* float32\({num_entries}\)"):
        run(anchored(mode), 2, 3, num_entries)


def test_a_return_of_another_type_is_refused():
    with pytest.raises(InternalError, match="1 elements of float64 in return 0, which is float32"):
        run(anchored("All", dtype="float64"), 1, 1, 1)


def test_a_return_that_is_not_there_is_refused():
    with pytest.raises(InternalError, match="fills return 1 of 1"):
        run(anchored("All", buffer=1), 1, 1, 1)


@pytest.mark.parametrize(
    "times, problem", [(0, "nothing fills return 0"), (2, "fills return 0 a second time")]
)
def test_each_return_is_filled_once(times, problem):
    with pytest.raises(InternalError, match=problem):
        run(anchored("All", times=times), 1, 1, 1)


@pytest.mark.parametrize(
    "phase, problem",
    [(ir.Phase.SETUP, "it runs with every run"), (ir.Phase.UPDATE, "per_update says whether")],
)
def test_an_anchor_in_another_phase_is_refused(phase, problem):
    with pytest.raises(InternalError, match=problem):
        run(anchored("All", phase=phase), 1, 1, 1)
