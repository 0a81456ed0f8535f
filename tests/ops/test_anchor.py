"""The op that copies a tensor to the host: which entry of a return a micro-batch goes to."""

import itertools

import pytest
import torch

from popsim_torch import _native, ir
from popsim_torch.anchors import kept_micro_batches, num_returned, shape_of_entries
from popsim_torch.enums import OutputMode
from popsim_torch.errors import InternalError
from popsim_torch.passes.native_graph import to_native


def make(
    shape=(1,),
    mode="All",
    dtype="float32",
    *,
    period=1,
    buffers=(0,),
    keep=False,
    phase=ir.Phase.FORWARD,
):
    """Return a program that copies its input to returns, and the input."""
    graph = ir.Graph()
    x = graph.add_tensor(ir.TensorKind.INPUT, torch.float32, shape)
    same = {"mode": mode, "period": period, "keep": keep, "per_update": False, "dtype": dtype}
    for buffer in buffers:
        graph.add_op("anchor", [x], [], {**same, "buffer": buffer}, phase=phase)
    return graph, x


def anchored(mode, dtype="float32", *, shape=(1,), **attributes):
    """Return such a program for the device."""
    return to_native(make(shape, mode, dtype, **attributes)[0])


def prepare(graph, iterations, accumulation):
    """Make an executable of a program."""
    config = _native.RunConfig(iterations, accumulation, True, "sequential")
    with _native.translated_errors():
        executable = _native.Executable(graph, config)
        executable.load()
    return executable


def run(graph, iterations, accumulation):
    """Run 0, 1, 2, ... through a program as so many device iterations and accumulation steps."""
    executable = prepare(graph, iterations, accumulation)
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
        assert run(anchored(mode, period=period), *counts) == values


@pytest.mark.parametrize("mode", [m for m in OutputMode if m != OutputMode.Default])
def test_the_device_keeps_what_the_rule_of_python_says(mode):
    for iterations, accumulation, period in itertools.product((1, 2, 4), (1, 3), (1, 2, 3, 4, 7)):
        num_steps = iterations * accumulation
        executable = prepare(
            anchored(mode.name, period=period, keep=True), iterations, accumulation
        )
        expected = [0.0] * num_returned(mode, period, iterations, accumulation, 1, any_period=True)
        for number in range(8):
            values = torch.arange(float(num_steps)) + number * num_steps
            executable.run([values])
            kept = kept_micro_batches(mode, period, iterations, accumulation, number * iterations)
            found = [float(values[i * accumulation + step]) for i in kept[0] for step in kept[1]]
            # A run that has no iteration of a longer period leaves what an earlier one kept.
            expected = [float(values.sum())] if mode == OutputMode.Sum else found or expected
            assert executable.read_kept(0, 0).tolist() == expected


@pytest.mark.parametrize(
    "buffers, problem",
    [
        ([1], "no op writes return 0"),
        ([0, 2], "no op writes return 1"),
        ([0, 0], "writes return 0, which another op writes too"),
    ],
)
def test_each_return_is_filled_once(buffers, problem):
    with pytest.raises(InternalError, match=problem):
        run(anchored("All", buffers=buffers), 1, 1)


@pytest.mark.parametrize(
    "shape, count, expected",
    [((), 1, ()), ((), 3, (3,)), ((2,), 3, (6,)), ((2, 5), 1, (2, 5)), ((0, 5), 3, (0, 5))],
)
def test_entries_come_back_in_the_shape_that_the_rule_of_python_says(shape, count, expected):
    assert shape_of_entries(shape, count) == expected
    executable = prepare(anchored("All", shape=shape), count, 1)
    (result,) = executable.run([torch.zeros(count, *shape)])
    assert tuple(result.shape) == expected


@pytest.mark.parametrize("keep", [False, True])
def test_a_kept_return_is_read_and_another_one_is_given_back(keep):
    executable = prepare(anchored("All", "float16", keep=keep), 1, 3)
    (result,) = executable.run([torch.arange(3.0)])
    assert (result is None) == keep
    result = executable.read_kept(0, 0) if keep else result
    assert result.dtype == torch.float16
    assert result.tolist() == [0, 1, 2]


def test_a_view_of_what_is_kept_is_read_contiguous():
    graph, x = make((2, 3), keep=True)
    turned = graph.add_view(x, (3, 2), (1, 3), 0)
    part = graph.add_view(x, (1, 3), (3, 1), 0)
    executable = prepare(to_native(graph), 2, 1)
    values = torch.arange(12.0).view(2, 2, 3)
    executable.run([values])
    read = executable.read_kept(0, turned.id)
    assert read.is_contiguous()
    assert torch.equal(read, values.mT.reshape(6, 2))
    with pytest.raises(InternalError, match="is not in return 0"), _native.translated_errors():
        executable.read_kept(0, part.id)


@pytest.mark.parametrize(
    "phase, problem",
    [(ir.Phase.SETUP, "the op runs in every run"), (ir.Phase.UPDATE, "per_update says whether")],
)
def test_an_anchor_in_another_phase_is_refused(phase, problem):
    with pytest.raises(InternalError, match=problem):
        run(anchored("All", phase=phase), 1, 1)
