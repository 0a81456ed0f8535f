"""Fusing chains of ``map`` ops: fewer ops, the same bits."""

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch.ir import Graph, Phase, Tensor, TensorKind
from popsim_torch.passes.fuse_elementwise import fuse_elementwise
from tests.unit.passes.sketch import verify_sketch


def add_map(
    graph: Graph,
    inputs: list[Tensor],
    code: list[str],
    dtype: torch.dtype = torch.float32,
    *,
    stage: int = 0,
    constants: tuple[float, ...] = (),
) -> Tensor:
    shape = inputs[0].shape
    out = graph.add_tensor(TensorKind.VALUE, dtype, shape)
    attributes = {
        "code": code,
        "constants": list(constants),
        "results": [len(inputs) + len(constants) + len(code) - 1],
        "dtypes": [str(dtype).removeprefix("torch.")],
        "shape": list(shape),
    }
    graph.add_op("map", inputs, [out], attributes, phase=Phase.FORWARD, stage=stage)
    return out


def graph_with_input(dtype: torch.dtype = torch.float32) -> tuple[Graph, Tensor]:
    graph = Graph()
    return graph, graph.add_tensor(TensorKind.INPUT, dtype, (4, 3), name="input")


def test_a_chain_becomes_one_op() -> None:
    graph, x = graph_with_input()
    y = add_map(graph, [x], ["exp 0"])
    z = add_map(graph, [y], ["mul 0 1"], constants=(2.0,))
    graph.add_op("anchor", [z], [], {}, phase=Phase.FORWARD)
    assert fuse_elementwise(graph) == 1
    verify_sketch(graph)
    fused, _ = graph.ops
    assert fused.inputs == [x.id]
    assert fused.outputs == [z.id]
    assert fused.attributes["code"] == ["exp 0", "mul 2 1"]
    assert fused.attributes["constants"] == [2.0]
    assert fused.attributes["results"] == [3]


def test_a_second_run_changes_nothing() -> None:
    graph, x = graph_with_input()
    add_map(graph, [add_map(graph, [x], ["exp 0"])], ["neg 0"])
    fuse_elementwise(graph)
    before = [(op.kind, list(op.inputs), dict(op.attributes)) for op in graph.ops]
    assert fuse_elementwise(graph) == 0
    assert [(op.kind, list(op.inputs), dict(op.attributes)) for op in graph.ops] == before


def test_a_tensor_with_two_readers_stays() -> None:
    graph, x = graph_with_input()
    y = add_map(graph, [x], ["exp 0"])
    add_map(graph, [y], ["neg 0"])
    graph.add_op("anchor", [y], [], {}, phase=Phase.FORWARD)
    assert fuse_elementwise(graph) == 0


def test_ops_of_different_stages_stay_apart() -> None:
    graph, x = graph_with_input()
    add_map(graph, [add_map(graph, [x], ["exp 0"])], ["neg 0"], stage=1)
    assert fuse_elementwise(graph) == 0


def test_float16_is_rounded_in_between() -> None:
    graph, x = graph_with_input(torch.float16)
    y = add_map(graph, [x], ["exp 0"], torch.float16)
    add_map(graph, [y], ["neg 0"], torch.float16)
    fuse_elementwise(graph)
    assert graph.ops[0].attributes["code"] == ["exp 0", "half 1", "neg 2"]


def test_a_tensor_read_twice_by_one_op_is_computed_once() -> None:
    graph, x = graph_with_input()
    y = add_map(graph, [x], ["exp 0"])
    out = graph.add_tensor(TensorKind.VALUE, torch.float32, x.shape)
    attributes = {
        "code": ["mul 0 0"],
        "constants": [],
        "results": [1],
        "dtypes": ["float32"],
        "shape": [4, 3],
    }
    graph.add_op("map", [y], [out], attributes, phase=Phase.FORWARD)
    assert fuse_elementwise(graph) == 1
    assert graph.ops[0].attributes["code"] == ["exp 0", "mul 1 1"]


class Chain(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x * 2 + 1) * x.abs() - torch.where(x > 0, x, -x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fusing_changes_no_bit(dtype: torch.dtype) -> None:
    x = torch.randn(5, 33).to(dtype)
    fused = poptorch.inferenceModel(Chain(), options())(x)
    names = ["Mul:0", "Add:0", "Sigmoid:0", "Abs:0", "Mul:0/1", "Greater:0", "Neg:0", "Where:0"]
    # An anchor is another reader, so nothing is fused.
    unfused = poptorch.inferenceModel(Chain(), options(*names))(x)
    assert torch.equal(fused, unfused)
    torch.testing.assert_close(fused, Chain()(x))


def options(*anchors: str) -> poptorch.Options:
    result = poptorch.Options().showCompilationProgressBar(False)
    for name in anchors:
        result.anchorTensor(name, name)
    return result
