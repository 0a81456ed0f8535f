"""The table of the device's ops: what every entry has to say."""

import ast
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from popsim_torch import _native
from popsim_torch.passes.op_table import op_table

ROOT = Path(__file__).parents[2]
FOLDERS = ("lowering", "passes")


def test_names_are_unique() -> None:
    names = [op.name for op in _native.op_table()]
    assert len(names) == len(set(names)) == len(op_table())


@pytest.mark.parametrize("op", _native.op_table(), ids=lambda op: op.name)
def test_the_family_is_the_folder_of_the_entry(op) -> None:
    folder = ROOT / "csrc" / "ops" / op.family
    entry = f'.name = "{op.name}",'
    assert any(entry in path.read_text() for path in folder.glob("*.cpp"))


@pytest.mark.parametrize("op", _native.op_table(), ids=lambda op: op.name)
def test_the_names_of_inputs_and_attributes_are_clear(op) -> None:
    names = [operand.name for operand in op.schema.inputs]
    names += [rule.name for rule in op.schema.attributes]
    known = {"momentum"}  # rmsprop's buffer and the switch for it
    assert all(names) and len(names) == len(set(names) | (set(names) & known))


def kinds_of(folder: str) -> Iterator[tuple[str, str]]:
    """Yield strings that stand for a kind of op, with the place where they stand.

    That is the first argument of ``Op``, of ``builder.op`` and ``graph.add_op``, an argument called
    ``kind`` of a function of the same file, what a ``.kind`` is compared with, and what an
    assignment to ``kind``, ``_KIND`` or ``_KINDS`` says.
    """
    for path in sorted((ROOT / "popsim_torch" / folder).rglob("*.py")):
        tree = ast.parse(path.read_text())
        positions = {"Op": 0, "op": 0, "add_op": 0}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                names = [argument.arg for argument in node.args.args]
                names = names[names[:1] == ["self"] :]
                if "kind" in names:
                    positions[node.name] = names.index("kind")
        for node in ast.walk(tree):
            where = f"{path.name}:{getattr(node, 'lineno', 0)}"
            for kind in _kinds_in(node, positions):
                yield kind, where


def _kinds_in(node: ast.AST, positions: Mapping[str, int]) -> Iterator[str]:
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        yield from _strings(*node.args[positions[name] :][:1]) if name in positions else ()
        yield from _strings(*(k.value for k in node.keywords if k.arg == "kind"))
    elif isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        if any(_is_kind(side) for side in sides):
            yield from _strings(*sides)
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(_is_kind(target) for target in targets) and node.value is not None:
            yield from _strings(node.value)


def _is_kind(node: ast.AST) -> bool:
    name = getattr(node, "attr", getattr(node, "id", ""))
    return name in ("kind", "_KIND", "_KINDS")


def _strings(*nodes: ast.AST) -> Iterator[str]:
    for node in nodes:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                yield inner.value


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_kind_that_python_names_exists(folder) -> None:
    found = list(kinds_of(folder))
    assert found
    assert [where for kind, where in found if kind not in op_table()] == []


def test_onednn_is_in_this_build_unless_it_was_left_out() -> None:
    assert _native.has_onednn() == (os.environ.get("POPSIM_WITHOUT_ONEDNN") != "1")
