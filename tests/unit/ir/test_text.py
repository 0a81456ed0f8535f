"""A graph as text: one line per op, with everything that a reader must know."""

import pytest
import torch

from popsim_torch.ir import Graph, Origin, Phase, Program, Role, TensorKind, program_text, to_text


def make_graph():
    graph = Graph()
    x = graph.add_tensor(TensorKind.INPUT, torch.float32, (2, 3), name="x")
    w = graph.add_tensor(TensorKind.VARIABLE, torch.float16, (), name="w")
    return graph, x, w


def value(graph, shape=(2, 3), name=""):
    return graph.add_tensor(TensorKind.VALUE, torch.float32, shape, name=name)


def test_an_empty_graph():
    assert to_text(Graph()) == ""


def test_one_op():
    graph, x, w = make_graph()
    graph.add_op("add", [x, w], [value(graph, name="Add:0")], phase=Phase.FORWARD)
    assert to_text(graph) == "forward 0: Add:0: float32[2, 3] = add(x: float32[2, 3], w: float16[])"


def test_one_line_per_op_in_their_order():
    graph, x, _ = make_graph()
    for name, phase in (("a", Phase.SETUP), ("b", Phase.FORWARD), ("c", Phase.UPDATE)):
        graph.add_op(name, [x], [value(graph)], phase=phase)
    assert [line.split("= ")[1].split("(")[0] for line in to_text(graph).splitlines()] == [
        "a",
        "b",
        "c",
    ]


def test_phase_and_stage_come_first():
    graph, x, _ = make_graph()
    for stage, phase in enumerate(Phase):
        graph.add_op("copy", [x], [value(graph)], phase=phase, stage=stage)
    heads = [line.split(":")[0] for line in to_text(graph).splitlines()]
    assert heads == ["setup 0", "forward 1", "backward 2", "update 3"]


def test_a_tensor_without_a_name_shows_its_id():
    graph, x, _ = make_graph()
    out = value(graph, (6,))
    graph.add_op("copy", [x], [out], phase=Phase.FORWARD)
    assert to_text(graph).startswith(f"forward 0: %{out.id}: float32[6] = copy(")


def test_absent_tensors_are_dashes():
    graph, x, _ = make_graph()
    graph.add_op("topk", [x, None], [None, value(graph, name="i")], phase=Phase.FORWARD)
    assert to_text(graph) == "forward 0: -, i: float32[2, 3] = topk(x: float32[2, 3], -)"


def test_an_op_without_outputs_has_no_arrow():
    graph, x, _ = make_graph()
    graph.add_op("anchor", [x], [], phase=Phase.FORWARD)
    assert to_text(graph) == "forward 0: anchor(x: float32[2, 3])"


def test_attributes():
    graph, x, _ = make_graph()
    attributes = {"mode": "All", "period": 2, "shape": [1, 2]}
    graph.add_op("anchor", [x], [], attributes, phase=Phase.FORWARD)
    assert to_text(graph).endswith(" {mode='All', period=2, shape=[1, 2]}")


def test_the_first_of_several_names_is_shown():
    graph, x, _ = make_graph()
    graph.set_name(x, "another")
    graph.add_op("print", [x], [], phase=Phase.FORWARD)
    assert to_text(graph) == "forward 0: print(x: float32[2, 3])"


def test_views_have_a_shape_of_their_own():
    graph, x, _ = make_graph()
    view = graph.add_view(x, (3, 2), (1, 3), 0)
    graph.set_name(view, "Transpose:0")
    graph.add_op("print", [view], [], phase=Phase.FORWARD)
    assert to_text(graph) == "forward 0: print(Transpose:0: float32[3, 2] in x[1, 3])"


def test_writing_changes_nothing():
    graph, x, _ = make_graph()
    graph.add_op("copy", [x], [value(graph)], phase=Phase.FORWARD)
    assert to_text(graph) == to_text(graph)
    assert len(graph.tensors) == 3


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "where"),
    [
        ((2, 3), (3, 1), 0, "x"),
        ((6,), (1,), 0, "x"),
        ((3,), (1,), 3, "x+3"),
        ((2,), (3,), 1, "x+1[3]"),
        ((2, 3, 4), (3, 1, 0), 0, "x[3, 1, 0]"),
    ],
)
def test_a_view_says_where_it_lies(shape, strides, offset, where):
    graph, x, _ = make_graph()
    view = graph.add_view(x, shape, strides, offset)
    graph.add_op("print", [view], [], phase=Phase.FORWARD)
    assert to_text(graph).endswith(f" in {where})")


def test_an_op_says_where_it_comes_from_if_asked():
    graph, x, _ = make_graph()
    origin = Origin(scope="layer1/0", source="net.py:12")
    graph.add_op("print", [x], [], phase=Phase.FORWARD, origin=origin)
    graph.add_op("print", [x], [], phase=Phase.FORWARD)
    first, second = to_text(graph, origins=True).splitlines()
    assert first == f"{second}  # layer1/0, net.py:12"
    assert to_text(graph).splitlines() == [second, second]


def test_a_program_says_what_it_is_given_and_what_comes_back():
    program = Program()
    graph = program.graph
    x = graph.add_tensor(TensorKind.INPUT, torch.float32, (2,), name="input", role=Role.INPUT)
    w = graph.add_tensor(TensorKind.VARIABLE, torch.float32, (2,), name="w", role=Role.PARAMETER)
    graph.add_tensor(TensorKind.CONSTANT, torch.int64, (2,), value=torch.tensor([3, 4]))
    graph.add_tensor(TensorKind.CONSTANT, torch.int64, (20,), value=torch.arange(20))
    y = value(graph, (2,))
    graph.add_op("copy", [x], [y], phase=Phase.FORWARD)
    graph.set_name(w, "again")
    program.outputs = [y.id]
    program.changed_inputs = {0: w.id}
    assert program_text(program).splitlines() == [
        "input input: float32[2]",
        "parameter w: float32[2]",
        "constant %2: int64[2] = [3, 4]",
        "constant %3: int64[20]",
        "",
        f"forward 0: %{y.id}: float32[2] = copy(input: float32[2])",
        "",
        f"output %{y.id}: float32[2]",
        "input 0 becomes w: float32[2]",
        "also again: w",
    ]
