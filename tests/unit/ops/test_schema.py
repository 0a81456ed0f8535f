"""Schemas of ops as strings, and the results of the parser."""

from __future__ import annotations

import pytest

from popsim_torch import _native
from popsim_torch.errors import InternalError


def parse(text: str) -> _native.Schema:
    with _native.translated_errors():
        return _native.parse_schema(text)


def attribute(text: str) -> _native.AttributeRule:
    (rule,) = parse(f"op(*, {text}) -> ()").attributes
    return rule


def test_inputs_and_outputs():
    schema = parse("op(Tensor a, Tensor? b, Tensor[] c) -> (Tensor, Tensor?[] rest)")
    operands = [(o.name, o.count, o.has_gaps) for o in (*schema.inputs, *schema.outputs)]
    assert schema.name == "op"
    assert operands == [
        *(("a", "one", False), ("b", "optional", False), ("c", "any", False)),
        *(("", "one", False), ("rest", "any", True)),
    ]


def test_element_types():
    schema = parse("op(Tensor a, Tensor{floats, bool} b, Tensor{indices}? c) -> Tensor")
    assert [operand.dtypes for operand in schema.inputs] == [
        [],
        ["float32", "float16", "bfloat16", "bool"],
        ["int32", "int64"],
    ]


def test_memory_that_an_output_shares():
    schema = parse("op(Tensor(a!) weight, Tensor(b) seen) -> (Tensor(a!) weight, Tensor(b))")
    shared = [(o.memory, o.written) for o in (*schema.inputs, *schema.outputs)]
    assert shared == [("a", True), ("b", False)] * 2


def test_operands_that_are_counted():
    schema = parse(
        "op[sets](Tensor? a, Tensor[n] b, Tensor[a] c, *, int n, int sets=1) -> Tensor[n]"
    )
    assert schema.repeats == "sets"
    assert [operand.count for operand in schema.inputs] == ["optional", "counted", "counted"]
    assert [operand.counter for operand in schema.inputs] == ["", "n", "a"]
    assert [operand.counter for operand in schema.outputs] == ["n"]


@pytest.mark.parametrize("kind", ["bool", "int", "float", "str", "arguments"])
def test_types_of_attributes(kind):
    rule = attribute(f"{kind} x")
    assert (rule.name, rule.type, rule.is_list, rule.required) == ("x", kind, False, True)
    assert (rule.choices, rule.least, rule.most) == ([], None, None)


def test_lists_and_what_may_be_left_out():
    assert attribute("int[] x").is_list
    assert attribute("int[] x").length is None
    assert attribute("int[2] x").length == 2
    assert not attribute("int[2]? x").required
    assert not attribute("float x=1.5").required


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [("int{1..} x", 1, None), ("int{..3}[] x", None, 3), ("float{0..0.5} x", 0, 0.5)],
)
def test_ranges(text, least, most):
    rule = attribute(text)
    assert (rule.least, rule.most) == (least, most)


def test_words():
    assert attribute("str{all, last} x").choices == ["all", "last"]
    assert attribute("dtype{floats} x").choices == ["float32", "float16", "bfloat16"]
    assert "int8" in attribute("dtype x").choices


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("op(Tensor a) -> Tensor b c", "more text at 'c'"),
        ("op(Tensor a", "expected ','"),
        ("op(Tensor) -> Tensor", "expected a word"),
        ("op(tensor a) -> Tensor", "not a Tensor"),
        ("op(Tensor a)", "expected '->'"),
        ("op(*, complex x) -> ()", "not a type of attributes"),
        ("op(*, int x, *, int y) -> ()", "a second *"),
        ("op(*, int x=one) -> ()", "expected a number"),
        ("op(*, bool x=1) -> ()", "not True or False"),
        ("op(*, int[] x=1) -> ()", "no default here"),
        ("op(Tensor{float31} a) -> ()", "'float31' is not a dtype"),
        ("op(Tensor[n] a) -> ()", "no attribute or input counts 'a'"),
        ("op(Tensor[] a, Tensor[] b) -> ()", "two lists of any length"),
        ("op[n](Tensor a) -> ()", "no attribute with the number of repeats"),
        ("op(Tensor a) -> Tensor(a!)", "not one input with the letter 'a'"),
    ],
)
def test_what_is_no_schema(text, problem):
    with pytest.raises(Exception, match=problem.replace("*", r"\*")):
        parse(text)


@pytest.mark.parametrize("op", _native.op_table(), ids=lambda op: op.name)
def test_every_entry_has_one(op):
    assert op.schema.name == op.name
    with pytest.raises(InternalError):
        parse(op.text + " ]")
