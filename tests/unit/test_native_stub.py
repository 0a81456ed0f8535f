"""The typed stub of the C++ library describes exactly what the library has."""

import ast
from pathlib import Path

from popsim_torch import _C

STUB = Path(__file__).parents[2] / "popsim_torch" / "_C.pyi"


def stub_names(body: list[ast.stmt]) -> set[str]:
    names = {node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    return names | {
        node.target.id
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def public(names: list[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_module_members_match_the_stub() -> None:
    tree = ast.parse(STUB.read_text())
    assert stub_names(tree.body) == public(dir(_C))


def test_class_members_match_the_stub() -> None:
    tree = ast.parse(STUB.read_text())
    enum_members = {"name", "value"}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or node.name.endswith("Error"):
            continue
        members = {n for n in stub_names(node.body) if not n.startswith("_")}
        found = public(list(vars(getattr(_C, node.name)))) - (enum_members - members)
        assert members == found, node.name
