"""The code of a map op: writing, reading, joining and comparing it."""

import math

import pytest
import torch

from popsim_torch.ir import Graph, Phase, TensorKind
from popsim_torch.ir.map_code import MapCode, num_instructions


@pytest.fixture
def tensor():
    graph = Graph()
    return lambda: graph.add_tensor(TensorKind.VALUE, torch.float32, (2,))


def op_of(inputs, code, constants=(), results=None):
    """Return a map op; its result is the last value if none are given."""
    graph = Graph()
    for _ in range(max(inputs, default=-1) + 1):
        graph.add_tensor(TensorKind.VALUE, torch.float32, (2,))
    last = len(inputs) + len(constants) + len(code) - 1
    attributes = {"code": code, "constants": list(constants), "results": results or [last]}
    return graph.add_op(
        "map", [graph.tensors[i] for i in inputs], [], attributes, phase=Phase.FORWARD
    )


def attributes(code, *results):
    code.results = list(results)
    return code.attributes()


def test_values_are_numbered_inputs_constants_instructions(tensor):
    code = MapCode()
    a, b = tensor(), tensor()
    product = code("mul", a, 2.0)
    result = code("add", product, b)
    assert code.inputs == [a.id, b.id]
    assert attributes(code, result) == {
        "code": ["mul 0 2", "add 3 1"],
        "constants": [2.0],
        "results": [4],
    }


def test_a_tensor_or_number_used_twice_has_one_number(tensor):
    code = MapCode()
    a = tensor()
    result = code("add", code("mul", a, 3.0), code("mul", a, 3))
    assert attributes(code, result)["code"] == ["mul 0 1", "mul 0 1", "add 2 3"]


def test_zero_and_negative_zero_are_two_constants(tensor):
    code = MapCode()
    code("add", code("add", tensor(), 0.0), -0.0)
    assert [math.copysign(1, c) for c in code.constants] == [1.0, -1.0]


def test_an_input_can_be_the_result(tensor):
    code = MapCode()
    result = code.value(tensor())
    assert attributes(code, result) == {"code": [], "constants": [], "results": [0]}


def test_a_constant_can_be_the_result():
    code = MapCode()
    result = code.value(4.0)
    assert attributes(code, result) == {"code": [], "constants": [4.0], "results": [0]}


def test_several_results(tensor):
    code = MapCode()
    first = code("exp", tensor())
    second = code("neg", first)
    assert attributes(code, second, first)["results"] == [2, 1]


@pytest.mark.parametrize(
    "op",
    [
        op_of([0, 1], ["add 0 1"]),
        op_of([2, 0, 1], ["where 0 3 1", "mul 4 2"], [0.5]),
        op_of([0], [], [], [0]),
        op_of([], [], [4.0], [0]),
        op_of([0], ["exp 0", "neg 1"], [], [2, 1, 0]),
    ],
    ids=["add", "constants", "input", "constant", "results"],
)
def test_what_is_read_is_written(op):
    code = MapCode.of(op)
    assert code.inputs == op.inputs
    assert code.attributes() == op.attributes
    assert num_instructions(op) == len(code.instructions)


def test_a_tensor_that_an_op_reads_twice_is_one_input():
    code = MapCode.of(op_of([1, 0, 1], ["where 0 1 2"]))
    assert code.inputs == [1, 0]
    assert code.attributes()["code"] == ["where 0 1 0"]


def test_another_op_is_taken_in():
    code = MapCode.of(op_of([3, 1], ["mul 0 2", "add 3 1"], [2.0]))
    known = {7: code.results[0]}
    code.results = code.append(op_of([1, 7, 5], ["sub 0 1", "max 4 3", "mul 5 2"], [2.0]), known)
    assert code.inputs == [3, 1, 5]
    assert code.attributes() == {
        "code": ["mul 0 3", "add 5 1", "sub 1 6", "max 7 4", "mul 8 2"],
        "constants": [2.0, 2.0],
        "results": [9],
    }


@pytest.mark.parametrize(
    ("dtype", "lines"),
    [(torch.float32, []), (torch.float16, ["half 0"]), (torch.bool, ["ne 0 1"])],
    ids=str,
)
def test_what_storing_does_to_a_value(tensor, dtype, lines):
    code = MapCode()
    stored = code.stored(code.value(tensor()), dtype)
    assert attributes(code, stored)["code"] == lines


@pytest.mark.parametrize(
    ("tensor_id", "inputs", "lines"),
    [
        (5, [5, 6, 7], ["where 0 1 2", "add 3 0"]),
        (6, [6, 5, 7], ["where 1 0 2", "add 3 1"]),
        (7, [7, 5, 6], ["where 1 2 0", "add 3 1"]),
    ],
)
def test_an_input_is_put_first(tensor_id, inputs, lines):
    code = MapCode.of(op_of([5, 6, 7], ["where 0 1 2", "add 3 0"]))
    code.put_first(tensor_id)
    assert code.inputs == inputs
    assert code.attributes() == {"code": lines, "constants": [], "results": [4]}


def masked(code, gradient, mask):
    return code("where", code("le", mask, 0.0), 0.0, gradient)


@pytest.mark.parametrize(
    ("inputs", "lines", "constants", "same"),
    [
        ([4, 9], ["le 1 2", "where 3 2 0"], [0.0], True),
        ([9, 4], ["le 0 2", "where 3 2 1"], [0.0], True),
        ([4, 9], ["le 0 2", "where 3 2 1"], [0.0], False),  # with exchanged operands
        ([4, 9], ["le 1 2", "where 3 2 0"], [1.0], False),
        ([4, 9], ["lt 1 2", "where 3 2 0"], [0.0], False),
        ([4, 9], ["le 1 2", "where 3 2 0", "exp 4"], [0.0], False),
        ([4, 9, 5], ["le 1 3", "where 4 3 0"], [0.0], True),  # an input that nothing reads
        ([4, 5, 9], ["le 1 3", "where 4 3 0"], [0.0], False),
    ],
)
def test_code_is_compared_with_a_formula(inputs, lines, constants, same):
    assert MapCode.of(op_of(inputs, lines, constants)).computes(masked, 4, 9) == same


def test_a_formula_gives_the_result():
    code = MapCode.of(op_of([0], ["exp 0", "neg 1"], [], [1]))
    assert not code.computes(lambda code, x: code("neg", code("exp", x)), 0)
