"""Readers and writers of a graph, and which part of its memory a tensor is."""

import pytest
import torch

from popsim_torch.ir import Graph, Phase, TensorKind, Uses, walk
from popsim_torch.ir.graph import NO_TENSOR


@pytest.fixture
def graph():
    return Graph()


def add(graph, kind=TensorKind.VALUE, shape=(2, 3)):
    return graph.add_tensor(kind, torch.float32, shape)


def test_views_have_the_readers_and_writers_of_their_memory(graph):
    x, y, z = add(graph, TensorKind.INPUT), add(graph), add(graph)
    seen = graph.add_view(y, (3, 2), (1, 3), 0)
    first = graph.add_op("map", [x], [y], phase=Phase.FORWARD)
    second = graph.add_op("map", [seen, y, None], [z], phase=Phase.FORWARD)
    uses = Uses(graph)
    assert [op is second for op in uses.readers(y.id)] == [True, True]
    assert list(uses.readers(seen.id)) == list(uses.readers(y.id))
    assert uses.writers(seen.id)[0] is first and len(uses.writers(y.id)) == 1
    assert not uses.writers(x.id) and not uses.readers(z.id)
    assert [uses.position(op) for _, op in walk(graph)] == [0, 1]


def test_the_only_reader_reads_once(graph):
    x, y, z = add(graph, TensorKind.INPUT), add(graph), add(graph)
    op = graph.add_op("map", [x, y], [z], phase=Phase.FORWARD)
    assert Uses(graph).only_reader(x.id) is op
    assert Uses(graph).only_reader(z.id) is None
    graph.add_op("map", [graph.add_view(x, (6,), (1,), 0)], [y], phase=Phase.FORWARD)
    assert Uses(graph).only_reader(x.id) is None


@pytest.mark.parametrize(("phase", "stays"), [(Phase.FORWARD, True), (Phase.UPDATE, False)])
def test_readers_of_a_variable_stay_where_their_phase_changes_it(graph, phase, stays):
    variable, y = add(graph, TensorKind.VARIABLE), add(graph)
    reader = graph.add_op("map", [variable, None], [y], phase=Phase.FORWARD)
    writer = graph.add_op("copy", [y], [variable], phase=phase)
    uses = Uses(graph)
    assert uses.reads_changed(reader) == stays
    assert not uses.reads_changed(writer)  # the op reads a value


def test_roots_leave_out_what_is_missing(graph):
    x = add(graph)
    view = graph.add_view(x, (3,), (1,), 3)
    assert [root.id for root in graph.roots([view.id, NO_TENSOR, x.id])] == [x.id, x.id]


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "whole"),
    [
        ((2, 3), (3, 1), 0, True),
        ((6,), (1,), 0, True),
        ((1, 2, 3), (7, 3, 1), 0, True),
        ((3, 2), (1, 3), 0, False),
        ((2, 2), (3, 1), 0, False),
        ((3,), (1,), 3, False),
        ((6,), (0,), 0, False),
        ((5,), (1,), 0, False),
        ((5,), (1,), 1, False),
    ],
    ids=str,
)
def test_what_covers_its_memory(graph, shape, strides, offset, whole):
    x = add(graph)
    assert graph.add_view(x, shape, strides, offset).covers(x) == whole
    assert x.covers(x)
