"""The table of the device's ops: what every entry has to say."""

import ast
import os
import re
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


# --- Facts of ops stand in their entries ---

# Where names of ops stand for something else, or say what becomes of one op of each.
NO_FACTS = {
    "csrc/graph/work.cpp": "kinds of work",
    "popsim_torch/lowering/rules/aten.py": "operators of PyTorch",
    "popsim_torch/passes/fuse_attention.py": "the ops of the pattern that it looks for",
}
PYTHON_FOLDERS = ("executor", "files", "ir", "lowering", "passes")
_CPP_STRING = re.compile(r'"([^"\n]*)"')
_CPP_LIST = re.compile(r"\{[^{};]*\}")
_CPP_KINDS = re.compile(r"kind\s*[=!]=\s*\"(\w+)\"")
_CPP_COMMENT = re.compile(r"//[^\n]*")


def name_lists_of_python(text: str) -> Iterator[tuple[int, set[str]]]:
    """Yield the line and the names of each collection of two kinds of ops or more."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Set, ast.Tuple, ast.List)):
            parts: list[ast.expr | None] = list(node.elts)
        elif isinstance(node, ast.Dict):
            parts = list(node.keys)
        elif isinstance(node, ast.BoolOp):  # kind == "a" or kind == "b"
            compared = [value for value in node.values if isinstance(value, ast.Compare)]
            parts = [part for value in compared for part in value.comparators]
        else:
            continue
        names = {
            part.value
            for part in parts
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        }
        if len(names & set(op_table())) > 1:
            yield node.lineno, names & set(op_table())


def name_lists_of_cpp(text: str) -> Iterator[tuple[int, set[str]]]:
    """Yield the same of C++: of lists in braces, and of comparisons in one statement."""
    text = _CPP_COMMENT.sub("", text)
    found = [(part.start(), _CPP_STRING.findall(part[0])) for part in _CPP_LIST.finditer(text)]
    start = 0
    for statement in re.split("(?<=;)", text):
        found.append((start, _CPP_KINDS.findall(statement)))
        start += len(statement)
    for position, strings in found:
        names = set(strings) & set(op_table())
        if len(names) > 1:
            yield text.count("\n", 0, position) + 1, names


def sources() -> Iterator[Path]:
    for folder in PYTHON_FOLDERS:
        yield from sorted((ROOT / "popsim_torch" / folder).rglob("*.py"))
    for suffix in ("*.cpp", "*.h"):
        yield from sorted((ROOT / "csrc").rglob(suffix))


def test_what_is_so_of_several_ops_is_said_in_their_entries():
    """A list of ops elsewhere is one that nobody thinks of who adds an op: op_def.h has a field."""
    found = {}
    for path in sources():
        lists = name_lists_of_python if path.suffix == ".py" else name_lists_of_cpp
        for line, names in lists(path.read_text()):
            found[f"{path.relative_to(ROOT)}:{line}"] = sorted(names)
    unexpected = {at: names for at, names in found.items() if at.split(":")[0] not in NO_FACTS}
    assert unexpected == {}
    assert NO_FACTS.keys() - {at.split(":")[0] for at in found} == set()


@pytest.mark.parametrize(
    "text",
    [
        '_EXACT = frozenset({"cat", "copy"})',
        'KINDS = ["map", *others, "copy"]',
        'x = op.kind in ("cat", "copy")',
        'x = op.kind == "cat" or op.kind == "copy"',
        'FACTS = {"cat": 1, "copy": 2}',
    ],
)
def test_a_list_in_python_is_found(text):
    assert [names for _, names in name_lists_of_python(text)]


@pytest.mark.parametrize(
    "text",
    [
        'constexpr std::array<std::string_view, 2> kExact{"cat", "copy"};',
        'const std::set<std::string> k = {\n  "cat",  // moves\n  "copy",\n};',
        'return op.kind == "cat" ||\n       op.kind == "copy";',
    ],
)
def test_a_list_in_cpp_is_found(text):
    assert [names for _, names in name_lists_of_cpp(text)]


@pytest.mark.parametrize(
    "text", ['add_op("cat", "copy");', 'f({"cat"}); f({"copy"});', '// {"cat", "copy"}']
)
def test_what_is_no_list_of_ops_is_not_found(text):
    assert list(name_lists_of_cpp(text)) == []


def test_onednn_is_in_this_build_unless_it_was_left_out() -> None:
    assert _native.has_onednn() == (os.environ.get("POPSIM_WITHOUT_ONEDNN") != "1")
