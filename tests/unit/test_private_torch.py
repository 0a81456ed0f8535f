"""Private names of PyTorch are used in one room only: ``private_torch``.

The name of an operator (``torch.ops.aten._softmax``) is not a part of PyTorch's Python: it is in
the graphs that PyTorch makes, and code that handles such a node names it.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.fx
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "popsim_torch"
ROOM = PACKAGE / "private_torch"

# An attribute of our own classes that a sparse tensor of PyTorch also has.
OURS = {"_values"}


def is_private(dotted: list[str]) -> bool:
    """Whether a name in torch is private."""
    if dotted[:2] == ["torch", "ops"]:
        return False
    return "experimental" in dotted or any(
        part.startswith("_") and not part.startswith("__") for part in dotted
    )


def private_names(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each private name of PyTorch that a source text uses."""
    tree = ast.parse(text)
    # The meaning of a name at the start of an attribute.
    known = {"torch": ["torch"]}
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            imported = [(alias.name.split("."), alias.asname) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            module = node.module.split(".")
            imported = [([*module, one.name], one.asname or one.name) for one in node.names]
        else:
            continue
        for dotted, name in imported:
            if dotted[0] == "torch":
                if name is not None:
                    known[name] = dotted
                if is_private(dotted):
                    yield node.lineno, ".".join(dotted)
    for node in nodes:
        if isinstance(node, ast.Attribute):
            dotted = _dotted(node, known)
            if dotted and is_private(dotted) and not is_private(dotted[:-1]):
                yield node.lineno, ".".join(dotted)
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            owner, name = (_dotted(node.args[0], known), node.args[1])
            if owner and isinstance(name, ast.Constant) and is_private([*owner, str(name.value)]):
                yield node.lineno, ".".join([*owner, str(name.value)])


def _dotted(node: ast.expr, known: dict[str, list[str]]) -> list[str]:
    """Return the full name of an attribute of a module or class of torch; else nothing."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in known:
        return []
    return [*known[node.id], *names[::-1]]


def sources() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each file of the package outside the room."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if ROOM not in path.parents:
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def test_private_names_of_torch_stand_in_their_room_alone():
    found = [
        f"{where}:{line}: {name}" for where, text in sources() for line, name in private_names(text)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from torch._C import DisableTorchFunction", "torch._C.DisableTorchFunction"),
        ("from torch.utils._pytree import tree_map as each", "torch.utils._pytree.tree_map"),
        ("from torch.overrides import wraps, _pop_mode", "torch.overrides._pop_mode"),
        ("from torch.fx.experimental import proxy_tensor", "torch.fx.experimental.proxy_tensor"),
        ("import torch._dynamo", "torch._dynamo"),
        ("import torch\ndef f():\n    with torch._C._DisableAutocast(): pass", "torch._C"),
        ("import torch.utils.checkpoint as c\nc._GLOBAL", "torch.utils.checkpoint._GLOBAL"),
        ("from torch import nn\nnn.modules._x", "torch.nn.modules._x"),
        ("import torch\ndef f(x: torch._ops.OpOverload): ...", "torch._ops"),
        ("import torch\ngetattr(torch.nn, '_x', None)", "torch.nn._x"),
        ("import torch\nmock.patch.object(torch.nn.modules, '_y', 1)", "torch.nn.modules._y"),
        ("if TYPE_CHECKING:\n    from torch._ops import OpOverload", "torch._ops.OpOverload"),
    ],
)
def test_the_scan_finds_private_names(text, name):
    assert [found for _, found in private_names(text)] == [name]


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.__version__",
        "from torch.fx import GraphModule\nfrom torch.overrides import TorchFunctionMode",
        "import torch\ntorch.ops.aten._softmax.default",
        "from popsim_torch import _native\n_native._C",
        "from popsim_torch.private_torch.modes import DisableTorchFunction",
        "import torch\nself._torch._x",
    ],
)
def test_the_scan_leaves_public_names_alone(text):
    assert list(private_names(text)) == []


def attributes_of_torch() -> dict[str, str]:
    """Return the private names of PyTorch's objects, and the objects that have them."""
    module = nn.Linear(1, 1)
    graph = torch.fx.symbolic_trace(module)
    owners = (
        torch.ones(1),
        torch.ones(1).untyped_storage(),
        nn.Parameter(torch.ones(1)),
        module,
        module(torch.ones(1, 1)).grad_fn,
        graph,
        graph.graph,
        next(iter(graph.graph.nodes)),
        torch.optim.SGD(module.parameters(), 0.1),
        torch.ops.aten.add,
        torch.ops.aten.add.Tensor,
        torch.utils.data.DataLoader([1]),
        torch.distributions.Normal(0.0, 1.0),
        torch.Generator(),
    )
    return {
        name: type(owner).__name__
        for owner in owners
        for name in dir(owner)
        if name.startswith("_") and not name.startswith("__")
    } | {"_opt_called": "Optimizer"}  # a scheduler sets this


def attributes_read(text: str) -> set[str]:
    """Return the private attributes of other objects that are read or set, by name or by string."""
    private: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                private.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args[1:]:
            if node.func.id in ("getattr", "setattr", "hasattr"):
                private |= _texts(node.args[1])
        elif isinstance(node, ast.Subscript):
            private |= _texts(node.slice)
        elif isinstance(node, ast.Dict):
            private |= set().union(*(_texts(key) for key in node.keys if key is not None))
    return private


def _texts(node: ast.expr) -> set[str]:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return {node.value} if is_text else set()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x._version", {"_version"}),
        ("x.y._version", {"_version"}),
        ("optimizer._opt_called = True", {"_opt_called"}),
        ("getattr(target, '_opname', '')", {"_opname"}),
        ("vars(module)['_modules']", {"_modules"}),
        ("{**state, '_iterator': None}", {"_iterator"}),
        ("self._version", set()),
        ("'_version'", set()),
    ],
)
def test_the_scan_finds_attributes(text, found):
    assert attributes_read(text) & attributes_of_torch().keys() == found


def test_private_attributes_of_torch_objects_are_read_in_the_room_alone():
    theirs = attributes_of_torch()
    found = {where: attributes_read(text) & theirs.keys() - OURS for where, text in sources()}
    assert {where: names for where, names in found.items() if names} == {}


@pytest.mark.parametrize("path", sorted(ROOM.glob("[!_]*.py")), ids=lambda path: path.stem)
def test_a_file_of_the_room_says_why_and_where_it_was_checked(path):
    text = path.read_text(encoding="utf-8")
    document = ast.get_docstring(ast.parse(text)) or ""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (pinned,) = re.findall(r'"torch==(\d+\.\d+)', project)
    assert "\nWhy: " in document
    checked = document.split("\nChecked: ")[1].removesuffix(".").replace(",", "").split()
    assert pinned in checked
    names = importlib.import_module(f"popsim_torch.private_torch.{path.stem}").__all__
    assert names
    unused = {
        name
        for name in names
        if not any(f"private_torch.{path.stem} import" in t and name in t for _, t in sources())
    }
    assert unused == set()
