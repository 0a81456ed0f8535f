"""The rules that ``passes.verify`` adds to those of the C++ library (unit/graph/test_verify.py)."""

import pytest
import torch

from popsim_torch.errors import InternalError
from popsim_torch.ir import Graph, Origin, Phase, TensorKind
from popsim_torch.passes.verify import verify

SINE = {"code": ["sin 0"], "constants": [], "results": [1], "dtypes": ["float32"]}


@pytest.fixture
def graph():
    """A small valid graph: ``out = sin(w)``, then ``copy`` of a view of it."""
    graph = Graph()
    graph.add_tensor(TensorKind.INPUT, torch.float32, (2, 3), name="x")
    w = graph.add_tensor(TensorKind.VARIABLE, torch.float32, (2, 3), name="w")
    out = graph.add_tensor(TensorKind.VALUE, torch.float32, (2, 3), name="out")
    graph.add_op("map", [w], [out], SINE, phase=Phase.FORWARD, name="Sin:0")
    flat = graph.add_view(out, (6,), (1,), 0)
    copy = graph.add_tensor(TensorKind.VALUE, torch.float32, (6,), name="copy")
    origin = Origin(source="net.py:12")
    graph.add_op("copy", [flat], [copy], phase=Phase.BACKWARD, name="Copy:0", origin=origin)
    return graph


def refused(graph, *parts):
    with pytest.raises(InternalError, match="verify: ") as caught:
        verify(graph)
    for part in parts:
        assert part in str(caught.value)


def test_a_valid_graph(graph):
    verify(graph)


def test_an_empty_graph():
    verify(Graph())


def test_verifying_changes_nothing(graph):
    tensors, ops, names = list(graph.tensors), list(graph.ops), dict(graph.names)
    verify(graph)
    assert (graph.tensors, graph.ops, graph.names) == (tensors, ops, names)


def test_an_id_that_is_not_the_position(graph):
    graph.tensors[1].id = 7
    refused(graph, "'w' has id 7 at 1")


def test_strides_of_dimensions_of_size_one_do_not_matter(graph):
    tensor = graph.add_tensor(TensorKind.INPUT, torch.float32, (1, 4, 1), name="thin")
    tensor.strides = (99, 1, 7)
    verify(graph)


@pytest.mark.parametrize("tensor_id", [-1, 5, 100])
def test_a_name_of_no_tensor(graph, tensor_id):
    graph.names["ghost"] = tensor_id
    refused(graph, "the name 'ghost' belongs to no tensor")


def test_a_name_of_a_value_that_nothing_writes(graph):
    graph.add_tensor(TensorKind.VALUE, torch.float32, (6,), name="lost")
    refused(graph, "nothing writes the tensor that is named 'lost'")


def test_a_rule_of_the_library_names_the_line_of_the_op(graph):
    del graph.ops[0]
    refused(graph, "'Copy:0' (copy, net.py:12)", "reads 'out' before it is written")


def test_a_view_counts_as_its_base(graph):
    """Writing through one view makes the base readable through another."""
    memory = graph.add_tensor(TensorKind.VALUE, torch.float32, (6,), name="memory")
    written = graph.add_view(memory, (2, 3), (3, 1), 0)
    read = graph.add_view(memory, (2, 2), (2, 1), 0)
    end = graph.add_tensor(TensorKind.VALUE, torch.float32, (2, 2))
    graph.add_op("copy", [graph.tensors[1]], [written], phase=Phase.UPDATE)
    graph.add_op("copy", [read], [end], phase=Phase.UPDATE)
    verify(graph)


def test_a_number_that_cpp_does_not_have(graph):
    graph.tensors[0].shape = (2**70, 3)
    with pytest.raises(InternalError, match="no tensor 'x' of shape"):
        verify(graph)


def test_an_attribute_that_cpp_does_not_have(graph):
    graph.ops[0].attributes["code"] = object()
    with pytest.raises(InternalError, match="no map 'Sin:0' with such values"):
        verify(graph)


def test_bodies_inside_of_too_many_others(graph):
    for _ in range(70):
        outer = Graph()
        outer.add_op("loop", [], [], phase=Phase.FORWARD).bodies = [graph]
        graph = outer
    refused(graph, "inside of more than 64 others")


def test_the_types_of_results_are_looked_at_if_asked_for(graph):
    out = graph.tensors[2]
    out.dtype = torch.float16
    graph.tensors[3].dtype = torch.float16
    verify(graph, types=False)
    with pytest.raises(InternalError, match=r"'Sin:0' \(map\): output 0 is float16"):
        verify(graph)
