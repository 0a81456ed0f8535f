"""An op's error names the op and the line of the user's code."""

import pytest
import torch

from popsim_torch import _native
from popsim_torch.errors import Error, InternalError
from popsim_torch.executor.build import build_executable
from popsim_torch.ir import Graph, LoopCounts, Origin, Phase, Program, TensorKind

F32 = torch.float32
WHERE = r"'Op:0' \(\w+, net\.py:12\)"


def build(kind, inputs, output, attributes):
    """Compile a program with one op, from the line net.py:12."""
    graph = Graph()
    tensors = [graph.add_tensor(TensorKind.VARIABLE, dtype, shape) for dtype, shape in inputs]
    out = graph.add_tensor(TensorKind.VARIABLE, *output)
    origin = Origin(source="net.py:12")
    graph.add_op(kind, tensors, [out], attributes, phase=Phase.FORWARD, name="Op:0", origin=origin)
    counts = LoopCounts(1, 1)
    executable = build_executable(Program(graph), counts, training=False)
    return executable, tensors


def test_a_rule_of_the_schema():
    with pytest.raises(InternalError, match=rf"{WHERE}: must hold: attribute 'axis' is given"):
        build("cumsum", [(F32, (3,))], (F32, (3,)), {})


def test_a_rule_of_the_shape():
    with pytest.raises(InternalError, match=rf"{WHERE}: output 0 is float32\(4\)"):
        build("cumsum", [(F32, (3,))], (F32, (4,)), {"axis": 0})


def test_what_a_shape_rule_does_not_know():
    code = {"code": ["nothing 0"], "constants": [], "results": [1], "dtypes": ["float32"]}
    with pytest.raises(InternalError, match=rf"{WHERE}: .*nothing"):
        build("map", [(F32, (3,))], (F32, (3,)), code)


def test_an_operator_of_pytorch_that_there_is_not():
    attributes = {"operator": "aten::nothing", "overload": "", "arguments": []}
    with pytest.raises((Error, InternalError), match=rf"{WHERE}: .*nothing"):
        build("aten", [], (F32, (3,)), attributes)


def test_a_run():
    table, rows = (F32, (3, 2)), (torch.int64, (4,))
    executable, (_, indices) = build("embedding", [table, rows], (F32, (4, 2)), {})
    executable.write(indices.id, torch.tensor([0, 1, 2, 3]))
    with (
        pytest.raises(Error, match=rf"while running {WHERE}: index 3 is out of range"),
        _native.translated_errors(),
    ):
        executable.run([])
