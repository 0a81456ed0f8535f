"""Every rule of ``ir.verify`` is noticed when it is broken, and named in the error."""

import pytest
import torch

from popsim_torch.errors import InternalError
from popsim_torch.ir import Graph, Phase, TensorKind, verify


@pytest.fixture
def graph():
    """A small valid graph: ``out = add(x, w)``, then ``copy`` of a view of it."""
    graph = Graph()
    x = graph.add_tensor(TensorKind.INPUT, torch.float32, (2, 3), name="x")
    w = graph.add_tensor(TensorKind.VARIABLE, torch.float32, (2, 3), name="w")
    out = graph.add_tensor(TensorKind.VALUE, torch.float32, (2, 3), name="out")
    graph.add_op("add", [x, w], [out], phase=Phase.FORWARD, name="Add:0")
    flat = graph.add_view(out, (6,), (1,), 0)
    copy = graph.add_tensor(TensorKind.VALUE, torch.float32, (6,), name="copy")
    graph.add_op("copy", [flat], [copy], phase=Phase.BACKWARD, name="Copy:0")
    return graph


def refused(graph, *parts):
    with pytest.raises(InternalError, match=r"ir\.verify") as caught:
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


def test_a_view_of_a_view(graph):
    view = graph.add_view(graph.tensors[0], (6,), (1,), 0)
    graph.set_name(view, "first")
    outer = graph.add_view(view, (3,), (1,), 0)
    graph.set_name(outer, "second")
    verify(graph)
    outer.base = view.id
    refused(graph, "'second' is a view and has a view as its base")


@pytest.mark.parametrize("index", [0, 1, 2], ids=["input", "variable", "value"])
def test_memory_that_is_not_contiguous(graph, index):
    graph.tensors[index].strides = (1, 2)
    refused(graph, f"'{graph.tensors[index].name}' owns memory and is not contiguous")


def test_strides_of_dimensions_of_size_one_do_not_matter(graph):
    tensor = graph.add_tensor(TensorKind.INPUT, torch.float32, (1, 4, 1), name="thin")
    tensor.strides = (99, 1, 7)
    verify(graph)


@pytest.mark.parametrize("tensor_id", [-1, 5, 100])
def test_a_name_of_no_tensor(graph, tensor_id):
    graph.names["ghost"] = tensor_id
    refused(graph, "the name 'ghost' belongs to no tensor")


def test_a_value_read_before_it_is_written(graph):
    graph.ops.reverse()
    graph.ops[0].phase = graph.ops[1].phase = Phase.FORWARD
    refused(graph, "copy 'Copy:0' (", "reads 'out' before it is written")


def test_a_value_that_nobody_writes(graph):
    del graph.ops[0]
    refused(graph, "copy 'Copy:0' (", "reads 'out' before it is written")


def test_a_view_counts_as_its_base(graph):
    """Writing through one view makes the base readable through another."""
    memory = graph.add_tensor(TensorKind.VALUE, torch.float32, (4,), name="memory")
    written = graph.add_view(memory, (2,), (1,), 0)
    read = graph.add_view(memory, (2, 2), (2, 1), 0)
    end = graph.add_tensor(TensorKind.VALUE, torch.float32, (2, 2))
    graph.add_op("fill", [], [written], phase=Phase.UPDATE)
    graph.add_op("copy", [read], [end], phase=Phase.UPDATE)
    verify(graph)


def test_an_op_that_writes_what_it_reads_first():
    graph = Graph()
    value = graph.add_tensor(TensorKind.VALUE, torch.float32, (2,), name="loop")
    graph.add_op("relu", [value], [value], phase=Phase.FORWARD, name="Relu:0")
    refused(graph, "reads 'loop' before it is written")


def test_an_op_behind_a_later_phase(graph):
    graph.ops[0].phase = Phase.UPDATE
    refused(graph, "copy 'Copy:0' (BACKWARD) stands after a later phase")


def test_absent_inputs_and_outputs(graph):
    x = graph.tensors[0]
    graph.add_op("optional", [x, None], [None], phase=Phase.BACKWARD)
    verify(graph)
