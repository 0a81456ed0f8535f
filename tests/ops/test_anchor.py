"""The op that copies a tensor to the host: which entry of a return a micro-batch goes to."""

import pytest
import torch

from popsim_torch import _native, ir
from popsim_torch.errors import InternalError
from popsim_torch.executor.build import to_native


def anchored(mode, period=1, dtype="float32"):
    """Return a program whose only op copies its input, of one element, to return 0."""
    graph = ir.Graph()
    x = graph.add_tensor(ir.TensorKind.INPUT, torch.float32, (1,))
    attributes = {
        "mode": mode,
        "period": period,
        "buffer": 0,
        "per_update": False,
        "dtype": dtype,
    }
    graph.add_op("anchor", [x], [], attributes, phase=ir.Phase.FORWARD)
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


@pytest.mark.parametrize("mode, num_entries", [("All", 5), ("All", 0), ("Final", 0), ("Sum", 0)])
def test_a_return_that_is_too_small_is_not_overrun(mode, num_entries):
    with pytest.raises(InternalError, match=r"entry \d of 4 bytes is outside of a buffer of"):
        run(anchored(mode), 2, 3, num_entries)
