"""Programs come back from a file unchanged, or not at all."""

import dataclasses
import json

import pytest
import torch

from popsim_torch.files.program import pack_program, program_digest, unpack_program
from popsim_torch.ir import Anchor, Graph, Phase, Program, TensorKind, graphs, program_text
from tests.mutants.programs import PROGRAMS, program


def some_program():
    program = Program()
    graph = program.graph
    x = graph.add_tensor(TensorKind.INPUT, torch.float32, (2,), name="x")
    w = graph.add_tensor(TensorKind.VARIABLE, torch.float32, (2,), name="w")
    c = graph.add_tensor(
        TensorKind.CONSTANT, torch.float32, (2,), name="c", value=torch.tensor([1.0, 2.0])
    )
    y = graph.add_tensor(TensorKind.VALUE, torch.float32, (2,), name="y")
    code = {"code": ["add 0 1"], "constants": [], "results": [2], "dtypes": ["float32"]}
    graph.add_op("map", [x, c], [y], {**code, "shape": [2]}, phase=Phase.FORWARD, name="y")
    keep = {"mode": "All", "period": 1, "buffer": 0, "dtype": "float32"}
    keep |= {"keep": False, "per_update": False}
    graph.add_op("anchor", [y], [], keep, phase=Phase.FORWARD, name="y")
    program.parameters["w"] = w.id
    program.outputs = [y.id]
    return program


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_with_every_op_come_back(name):
    written = program(name).program
    brings_code = name in ("custom", "host")
    read = unpack_program(pack_program(written), runs=not brings_code)
    assert program_text(read) == program_text(written)
    assert program_digest(read) == program_digest(written)
    for field in dataclasses.fields(Program):
        if field.name != "graph":
            assert getattr(read, field.name) == getattr(written, field.name)
    for mine, theirs in zip(graphs(read.graph), graphs(written.graph), strict=True):
        assert_same(mine, theirs)


def assert_same(mine, theirs):
    for a, b in zip(mine.tensors, theirs.tensors, strict=True):
        assert dataclasses.replace(a, value=None) == dataclasses.replace(b, value=None)
        if b.value is not None:
            assert torch.equal(a.value, b.value)
    for a, b in zip(mine.ops, theirs.ops, strict=True):
        assert dataclasses.replace(a, bodies=[]) == dataclasses.replace(b, bodies=[])
    assert mine.names == theirs.names


def test_every_part_of_a_graph_is_written():
    assert set(vars(Graph())) == {"tensors", "ops", "names"}


def change(path, value):
    """Return the sections of a program with one value replaced."""
    sections = pack_program(some_program())
    data = json.loads(sections["program"])
    target = data
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    return {**sections, "program": json.dumps(data).encode()}


GRAPH = ("Program", "graph", "Graph")
TENSOR = (*GRAPH, "tensors")
OP = (*GRAPH, "ops", 0, "Op")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("Program", "parameters"), {"dict": [["w", 9]]}),
        (("Program", "parameters"), {"dict": [["w", -1]]}),
        (("Program", "parameters"), {"dict": [["w", 0]]}),
        (("Program", "outputs"), [7]),
        (("Program", "outputs"), [3, 3]),
        (("Program", "changed_inputs"), {"dict": [[1, 3]]}),
        (("Program", "changed_state"), ["b"]),
        (("Program", "checkpoints"), {"set": [11]}),
        (("Program", "graph"), None),
        ((*OP, "kind"), "unknown"),
        ((*OP, "inputs"), [0, 9]),
        ((*OP, "phase"), {"enum": ["ir.Phase", "UPDATE"]}),
        ((*OP, "attributes"), {"dict": []}),
        ((*TENSOR, 0, "Tensor", "id"), 3),
        ((*TENSOR, 0, "Tensor", "shape"), {"tuple": [-2]}),
        ((*TENSOR, 2, "Tensor", "value"), None),
        ((*TENSOR, 2, "Tensor", "shape"), {"tuple": [1]}),
        ((*TENSOR, 1, "Tensor", "value"), {"tensor": 0}),
        ((*TENSOR, 2, "Tensor", "dtype"), {"dtype": "int32"}),
        ((*TENSOR, 3, "Tensor", "kind"), {"enum": ["TensorKind", "CONSTANT"]}),
    ],
    ids=str,
)
def test_programs_that_break_a_rule_are_refused(path, value):
    with pytest.raises(ValueError, match=r"program|Tensor|Program|Graph|cannot"):
        unpack_program(change(path, value))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("keep", True, "does not return what it computes"),
        ("keep", 1, "breaks a rule"),
        ("buffer", -1, "breaks a rule"),
    ],
)
def test_programs_that_bring_back_something_else_are_refused(name, value, message):
    program = some_program()
    program.graph.ops[-1].attributes[name] = value
    with pytest.raises(ValueError, match=message):
        unpack_program(pack_program(program))


def test_anchors_that_nothing_keeps_are_refused():
    program = some_program()
    program.anchors["y"] = Anchor(program.outputs[0], 0, (2,), 0)
    with pytest.raises(ValueError, match="keeps nothing for an anchor"):
        unpack_program(pack_program(program))


def test_what_is_no_program_is_refused():
    sections = pack_program(some_program())
    with pytest.raises(ValueError, match="is none"):
        unpack_program({**sections, "program": b"[]"})
    with pytest.raises(ValueError, match="missing"):
        unpack_program({"program": sections["program"]})
    with pytest.raises(ValueError, match="cannot be read"):
        unpack_program({**sections, "program.tensors": b"\xff" * 20})


def test_the_digest_forgets_lines_and_knows_constants():
    one, other = some_program(), some_program()
    origin = other.graph.ops[0].origin
    other.graph.ops[0].origin = dataclasses.replace(origin, source="elsewhere.py:3")
    assert program_digest(one) == program_digest(other)
    other.graph.tensors[2].value[0] = 5
    assert program_digest(one) != program_digest(other)
