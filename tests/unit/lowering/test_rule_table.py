"""The table of lowering rules: one rule for each operator."""

import ast
from pathlib import Path

import pytest
import torch
import torch.fx

import popsim_torch.lowering
from popsim_torch import _native
from popsim_torch.errors import InternalError
from popsim_torch.lowering.rules.rule import Family, Rule
from popsim_torch.lowering.rules.table import RULES, RuleTable

aten = torch.ops.aten
FIRST, SECOND = (Rule(lambda builder, node, place: None) for _ in range(2))


def node_of(target, *values):
    """Return a node that calls an operator with such tensors."""
    graph = torch.fx.Graph()
    sources = [graph.placeholder(f"x{i}") for i in range(len(values))]
    for source, value in zip(sources, values, strict=True):
        source.meta["val"] = value
    node = graph.call_function(target, tuple(sources))
    node.meta["val"] = target(*values)
    return node


def test_two_files_that_claim_an_operator_are_refused():
    with pytest.raises(InternalError, match=r"two rules claim the operator aten\.exp\.default"):
        RuleTable([{aten.exp.default: FIRST}, {aten.sin.default: FIRST, aten.exp.default: SECOND}])


def test_a_file_that_claims_an_operator_of_a_family_is_refused():
    family = Family(lambda target: target is aten.exp.default, FIRST)
    RuleTable([{aten.sin.default: SECOND}], [family])
    with pytest.raises(InternalError, match=r"two rules claim the operator aten\.exp\.default"):
        RuleTable([{aten.exp.default: SECOND}], [family])


def test_two_families_that_claim_an_operator_are_refused():
    table = RuleTable([], [Family(lambda _target: True, rule) for rule in (FIRST, SECOND)])
    with pytest.raises(InternalError, match=r"two rules claim the operator aten\.exp\.default"):
        table.rule_of(node_of(aten.exp.default, torch.ones(2)))


def test_what_a_rule_does_not_support_runs_through_pytorch():
    on_halves = Rule(FIRST.lower, lambda node: node.meta["val"].dtype == torch.float16)
    table = RuleTable([{aten.exp.default: on_halves}])
    unknown = table.rule_of(node_of(aten.sin.default, torch.ones(2)))
    assert table.rule_of(node_of(aten.exp.default, torch.ones(2).half())) is on_halves
    assert table.rule_of(node_of(aten.exp.default, torch.ones(2))) is unknown


@pytest.mark.parametrize("target", [aten.view_copy.default, aten.t.default, aten.detach.default])
def test_views_are_a_family(target):
    assert target not in RULES.rules
    x = torch.ones(2, 3)
    node = node_of(aten.t.default, x)
    assert RULES.rule_of(node) is RULES.rule_of(node_of(aten.alias.default, x))


def test_dropout_draws_numbers_in_training_only():
    x = torch.ones(2, 3)
    graph = torch.fx.Graph()
    source = graph.placeholder("x")
    source.meta["val"] = x
    rules = []
    for training in (True, False):
        node = graph.call_function(aten.native_dropout.default, (source, 0.5, training))
        node.meta["val"] = aten.native_dropout.default(x, 0.5, training)
        rules.append(RULES.rule_of(node))
    drawing = node_of(aten.rand_like.default, x)
    assert rules[0] is RULES.rule_of(drawing)
    assert rules[1] is RULES.rule_of(node_of(aten.sinc.default, x))


# The kinds of ops. Functions that add an op take its kind as their first argument, or as a
# parameter of that name.

LOWERING = Path(popsim_torch.lowering.__file__).parent


def kinds_added(source):
    """Yield the kinds of ops that a file's source adds, if they are literals."""
    tree = ast.parse(source)
    positions = {"op": 0, "add_op": 0, "Op": 0}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name not in positions:
            names = [a.arg for a in node.args.args if a.arg != "self"]
            if "kind" in names:
                positions[node.name] = names.index("kind")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            position = positions.get(name)
            if position is not None and position < len(node.args):
                argument = node.args[position]
                if isinstance(argument, ast.Constant):
                    yield argument.value


def test_kinds_are_found():
    source = """
def rule(builder, kind): builder.op(kind, [])
def other(builder):
    rule(builder, "first")
    builder.op("second", [], [])
"""
    assert list(kinds_added(source)) == ["first", "second"]


@pytest.mark.parametrize("path", sorted(LOWERING.rglob("*.py")), ids=lambda path: path.name)
def test_every_kind_that_is_added_is_in_the_table_of_ops(path):
    known = {op.name for op in _native.op_table()}
    assert set(kinds_added(path.read_text())) <= known


def test_the_rules_add_most_kinds():
    found = {kind for path in LOWERING.rglob("*.py") for kind in kinds_added(path.read_text())}
    assert {"map", "matmul", "softmax", "softmax_grad", "aten", "recurrent_grad"} <= found
    assert len(found) >= 30
