"""The layers of the project: imports and includes only point downwards.

The tables below are the rules; the functions read source text, never import
it, so that the rules also hold for code inside functions and `TYPE_CHECKING`.

A folder and the files directly in it are one room; each folder inside it is a separate room, at
every depth. The tables order the rooms of the first depth (those of ops two deep). Rooms must not
use each other in a cycle.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import combinations, pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Lowest layer first. A module may import any module of a lower layer, and its
# neighbours in its own layer as long as no cycle appears.
PYTHON_LAYERS = (
    ("_C", "private_torch", "typed_torch"),
    (
        *(
            "enums",
            "errors",
            "dtypes",
            "wrapper_tensors",
            "profiling",
            "shared_scope",
            "shallow_copies",
            "version",
        ),
        "host_trace",
        "verdict",
        "tables",
        "queue_state",
    ),
    ("alias", "environment", "logs", "tensors"),
    ("anchors", "_native"),
    ("ir",),
    ("reference",),
    ("hardware", "processor", "processes", "statistics"),
    ("options", "stages", "optim", "arguments"),
    (
        *("ops", "annotations", "control_flow", "host_call", "data", "dataloader", "attributes"),
        "compile_hooks",
        "poptorch_core",
    ),
    ("custom_ops", "feeds"),
    ("observe",),
    ("trace", "passes"),
    ("machine",),
    ("searches",),
    ("lowering",),
    ("optimizer_steps",),
    ("files",),
    ("records",),
    ("report",),
    ("executor",),
    ("model", "loading", "loops", "capsules", "estimates"),
    ("pipelining", "testing", "training", "planner", "validation"),
    ("__init__",),
    ("pytest_plugin",),
    ("runner",),
    ("names_command",),
    ("__main__", "standin"),
)
PYTHON_STRANGERS = (("trace", "passes"), ("optim", "passes"), ("optim", "trace"))
# Which modules may import a module that lower layers otherwise allow for all.
PYTHON_DOORS = {
    "_C": {"_native"},
    "_native": {
        "trace",
        "passes",
        "ops",
        "custom_ops",
        "feeds",
        "processor",
        "stages",
        "arguments",
        "executor",
        "machine",
        "model",
        "loops",
        "searches",
    },
}

# The families of ops; a family may use another one only if it is listed here.
CPP_FAMILIES = tuple(
    f"ops/{name}"
    for name in (
        *("aten", "attention", "control", "convolution", "custom", "decode", "embedding", "host"),
        *("layout", "loss", "map", "matmul", "norm", "observe", "points", "pool", "random"),
        *("recurrent", "reduce", "resample", "scatter", "softmax", "update"),
    )
)
CPP_FRIENDS = {frozenset(("ops/attention", "ops/map"))}

CPP_LAYERS = (
    ("base",),
    ("processor",),
    ("threads",),
    ("target", "graph", "dense"),
    ("cost", "schedule"),
    ("memory",),
    ("ops",),
    ("ops/math",),
    ("ops/operands",),
    CPP_FAMILIES,
    ("runtime",),
    ("feeds",),
    ("machine",),
    ("bindings",),
)
CPP_STRANGERS = (
    ("threads", "target"),
    ("threads", "graph"),
    ("dense", "target"),
    ("dense", "graph"),
    ("dense/tile", "dense/vector"),
    *(("machine", name) for name in ("threads", "dense", "memory", "runtime", "feeds")),
    *(pair for pair in combinations(CPP_FAMILIES, 2) if frozenset(pair) not in CPP_FRIENDS),
)
# Foreign headers by prefix, and the folders that may include them; the longest prefix is used.
CPP_DOORS = {
    "ATen/": {"ops", "runtime", "feeds", "bindings"},
    "ATen/Parallel": {"threads"},
    "omp.h": {"threads"},
    "c10/": {"ops", "runtime", "feeds", "bindings"},
    "torch/": {"ops", "runtime", "bindings"},
    "torch/extension.h": {"bindings"},
    "oneapi/dnnl": {"dense"},
}
# ATen headers that dense may include, in files that do not use oneDNN.
CPP_VECTORS = "ATen/cpu/vec/"
# The one room that shares work between threads.
CPP_THREADS = "threads"

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', re.MULTILINE)
_BLOCK_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_LINE_COMMENT = re.compile(r"//[^\n]*")
# `omp simd` is for the vector unit of one thread.
_THREAD_WORDS = re.compile(
    r"\bomp_\w+|#[ \t]*pragma[ \t]+omp[ \t]+(?!simd\b)\w+|\bparallel_(?:for|reduce)\b"
)
_CPP_SUFFIXES = {".h", ".hpp", ".cpp", ".cc", ".inl"}

Edges = dict[tuple[str, str], str]  # (from, to) -> a file that does it


class Layers:
    """A layer table, with the two questions asked about an edge."""

    def __init__(self, layers: Sequence[Sequence[str]], strangers: Sequence[tuple[str, str]]):
        self.level = {name: level for level, names in enumerate(layers) for name in names}
        self.strangers = {frozenset(pair) for pair in strangers}

    def knows(self, name: str) -> bool:
        return name in self.level

    def problems(self, edges: Edges) -> Iterator[str]:
        """Yield the problems of the edges; all names of the edges are known."""
        for (source, target), where in edges.items():
            if self.level[target] > self.level[source]:
                yield f"{where}: {source} may not use {target}, which is a higher layer"
            elif frozenset((source, target)) in self.strangers:
                yield f"{where}: {source} and {target} must not know each other"
        level = self.level
        yield from _circles(
            "cycle inside one layer",
            {edge: where for edge, where in edges.items() if level[edge[0]] == level[edge[1]]},
        )


def _circles(what: str, edges: Edges) -> Iterator[str]:
    """Yield a line about a cycle among the edges, if there is one."""
    users: dict[str, set[str]] = {}
    for source, target in edges:
        users.setdefault(target, set()).add(source)
    try:
        TopologicalSorter(users).prepare()
    except CycleError as error:
        circle = error.args[1]
        files = ", ".join(edges[edge] for edge in pairwise(circle))
        yield f"{what}: {' -> '.join(circle)} (by {files})"


def python_problems(package: Path) -> list[str]:
    """Return one line per broken rule in the Python files of the package."""
    layers = Layers(PYTHON_LAYERS, PYTHON_STRANGERS)
    found: list[str] = []
    edges: Edges = {}
    rooms: Edges = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        where = path.relative_to(package).as_posix()
        source = parts[0]
        if not layers.knows(source):
            found.append(f"{where}: module {source} has no layer; add it to PYTHON_LAYERS")
            continue
        room = _python_room(parts)
        for module in _imported_modules(path, package):
            target_room = _python_room(module)
            if target_room != room and module[0] == source:
                rooms.setdefault((room, target_room), where)
            target = module[0]
            if target == source:
                continue
            if not layers.knows(target):
                found.append(f"{where}: imports {target}, which has no layer")
            elif source not in PYTHON_DOORS.get(target, {source}):
                found.append(f"{where}: {source} may not import {target}")
            else:
                edges.setdefault((source, target), where)
    return [*found, *layers.problems(edges), *_circles("cycle inside one room", rooms)]


def _python_room(module: Sequence[str]) -> str:
    """Return the room of a module: its folder, or the module itself directly in the package."""
    return "/".join(module[:-1] or module)


def _imported_modules(path: Path, package: Path) -> Iterator[tuple[str, ...]]:
    """Yield the module after each import, by its parts from the package on."""
    # `__init__.py` is the package itself, so `from .` means one part more there.
    inside = [package.name, *path.relative_to(package).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules = [(alias.name.split("."), None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = inside[: len(inside) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            modules = [(base, alias.name) for alias in node.names]
        else:
            continue
        for dotted, name in modules:
            if dotted[0] == package.name:
                yield _module_of(package, dotted[1:], name)


def _module_of(package: Path, parts: Sequence[str], name: str | None) -> tuple[str, ...]:
    """Return the module that ``import parts`` or ``from parts import name`` reaches."""
    inner = package.joinpath(*parts)
    if name is not None and _is_module(inner / name):
        inner, parts = inner / name, [*parts, name]
    # A name that only the package itself has is in its `__init__.py`.
    return (*parts, "__init__") if not parts or inner.is_dir() else tuple(parts)


def _is_module(path: Path) -> bool:
    # The extension counts as a module even before it is built.
    return path.name == "_C" or path.is_dir() or path.with_suffix(".py").is_file()


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _room(path: str) -> str:
    """Return the name in the table for a file, given by its path from the root of csrc."""
    folders = path.split("/")[:-1]
    return "/".join(folders[: 2 if folders[:1] == ["ops"] else 1])


def cpp_problems(csrc: Path) -> list[str]:
    """Return one line per broken rule in the C++ files below the folder."""
    layers = Layers(CPP_LAYERS, CPP_STRANGERS)
    found: list[str] = []
    edges: Edges = {}
    rooms: Edges = {}
    for path in sorted(path for path in csrc.rglob("*") if path.suffix in _CPP_SUFFIXES):
        where = path.relative_to(csrc).as_posix()
        source = _room(where)
        folder = where.split("/")[0]
        if not layers.knows(source):
            found.append(f"{where}: {source} has no layer; add it to CPP_LAYERS")
            continue
        text = _BLOCK_COMMENT.sub("", path.read_text(encoding="utf-8"))
        if source != CPP_THREADS:
            for word in _THREAD_WORDS.findall(_LINE_COMMENT.sub("", text)):
                found.append(f"{where}: only {CPP_THREADS} may name {word}")
        for bracket, header in _INCLUDE.findall(text):
            target = _room(header)
            if "/" in header and layers.knows(target):
                if target != source:
                    edges.setdefault((source, target), where)
                inner = (_folder(where), _folder(header))
                if inner[0] != inner[1] and target == source:
                    rooms.setdefault(inner, where)
                if frozenset(inner) in layers.strangers and inner != (source, target):
                    found.append(f"{where}: {inner[0]} and {inner[1]} must not know each other")
                if bracket == "<":
                    found.append(f"{where}: write own header {header} in quotes")
                continue
            doors = sorted(door for door in CPP_DOORS if header.startswith(door))[-1:]
            vectors = folder == "dense" and header.startswith(CPP_VECTORS)
            if vectors and "dense/onednn.h" in text:
                # torch ships the headers of another oneDNN.
                found.append(f"{where}: {header} beside oneDNN")
            elif not vectors and any(folder not in CPP_DOORS[door] for door in doors):
                found.append(f"{where}: {folder} may not include {header}")
            elif bracket == '"' and not doors:
                found.append(f"{where}: write {header} from the root of csrc")
    return [*found, *layers.problems(edges), *_circles("cycle inside one room", rooms)]


# --- The project keeps the rules ----------------------------------------------


def test_python_imports_point_downwards():
    assert python_problems(ROOT / "popsim_torch") == []


def test_cpp_includes_point_downwards():
    assert cpp_problems(ROOT / "csrc") == []


# --- The checker finds what it should -----------------------------------------


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model.py", "from . import enums\nfrom .ir import graph\nfrom ._native import run"),
        ("options.py", "from .enums import OutputMode\nfrom .stages import Block"),
        ("trace/tracer.py", "from ..ir.graph import Graph\nfrom .names import scope"),
        ("trace/__init__.py", "from .tracer import trace"),
        ("_native.py", "from popsim_torch import _C\nfrom .errors import Error"),
        ("options/text.py", "from .options import Options"),
        ("__init__.py", "from .model import trainingModel\nfrom .enums import OutputMode"),
        ("ir/graph.py", "import torch.fx\nfrom collections import enums"),
    ],
)
def test_allowed_python_imports(tmp_path, name, text):
    package = tmp_path / "popsim_torch"
    write_tree(package, {"enums.py": "", "ir/__init__.py": "", name: text})
    assert python_problems(package) == []


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("enums.py", "from .model import x", "enums may not use model"),
        ("enums.py", "def late():\n    import popsim_torch.ir.graph", "enums may not use ir"),
        ("ir/graph.py", "from .. import options", "ir may not use options"),
        ("ir/graph.py", "from popsim_torch.reference import OPS", "ir may not use reference"),
        ("trace/tracer.py", "from ..passes import manager", "must not know each other"),
        ("passes/fold.py", "from ..trace.names import scope", "must not know each other"),
        ("stages.py", "import popsim_torch", "stages may not use __init__"),
        ("stages.py", "from popsim_torch import trainingModel", "stages may not use __init__"),
        ("options/text.py", "from ..trace import names", "options may not use trace"),
        ("model.py", "from . import trainingModel", "model may not use __init__"),
        ("options.py", "from ._native import run", "options may not import _native"),
        ("model.py", "from ._C import run", "model may not import _C"),
        ("surprise.py", "", "surprise has no layer"),
        ("model.py", "from .surprise import x", "surprise, which has no layer"),
        (
            "options.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .model import x",
            "options may not use model",
        ),
    ],
)
def test_forbidden_python_imports(tmp_path, name, text, problem):
    package = tmp_path / "popsim_torch"
    write_tree(package, {"__init__.py": "", "options.py": "", name: text})
    assert [line for line in python_problems(package) if problem in line and name in line]


def test_python_cycle_inside_a_layer(tmp_path):
    package = tmp_path / "popsim_torch"
    write_tree(
        package, {"options.py": "from . import stages", "stages.py": "from . import options"}
    )
    (problem,) = python_problems(package)
    assert problem.startswith("cycle inside one layer: ")


# Each line: a file of the package, and what it imports.
@pytest.mark.parametrize(
    "files",
    [
        {
            "trace/tracer.py": "from .control import flow",
            "trace/control/flow.py": "from .. import x",
        },
        {
            "trace/tracer.py": "from popsim_torch.trace.control.flow import y",
            "trace/control/flow.py": "from popsim_torch.trace.names import scope",
        },
        {
            "trace/control/flow.py": "from ..values import number",
            "trace/values/number.py": "import popsim_torch.trace.control.deep.cut",
            "trace/control/deep/cut.py": "def f():\n    from ...control import flow",
        },
        {
            "trace/a/b/c/d.py": "from ..e import f",
            "trace/a/b/e.py": "if TYPE_CHECKING:\n    from .c import d",
        },
    ],
)
def test_python_cycle_inside_a_room(tmp_path, files):
    package = tmp_path / "popsim_torch"
    write_tree(package, {"trace/__init__.py": "", "trace/names.py": "", **files})
    (problem,) = python_problems(package)
    assert problem.startswith("cycle inside one room: trace")
    assert all(name in problem for name in files)


def test_python_rooms_inside_a_room_use_each_other_one_way(tmp_path):
    package = tmp_path / "popsim_torch"
    files = {
        "trace/__init__.py": "from .tracer import trace",
        "trace/tracer.py": "from .control import flow\nfrom popsim_torch.trace import values",
        "trace/control/flow.py": "from ..values.number import one\nfrom . import cut",
        "trace/control/cut.py": "from popsim_torch.trace.control import flow",
        "trace/values/number.py": "from popsim_torch.ir import graph",
    }
    write_tree(package, files)
    assert python_problems(package) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("graph/graph.cpp", '#include "graph/graph.h"\n#include <vector>\n#include "base/ids.h"'),
        ("ops/gemm.cpp", '#include "dense/gemm.h"\n#include <ATen/Tensor.h>\n#include <c10/x.h>'),
        ("ops/map/map.cpp", '#include "ops/operands/rows.h"\n#include "ops/map/plan.h"'),
        ("ops/attention/score.cpp", '#include "ops/map/runner.h"'),
        ("dense/gemm.cpp", '#include "oneapi/dnnl/dnnl.hpp"\n#include "base/check.h"'),
        ("dense/gemm.cpp", '#include "threads/tasks.h"\n#include <ATen/cpu/vec/vec.h>'),
        ("threads/t.cpp", "#include <omp.h>\n#include <ATen/Parallel.h>\n#pragma omp parallel"),
        ("ops/sum.cpp", "#pragma omp simd\n// as at::parallel_for\nint compare(int x);"),
        ("bindings/module.cpp", '#include <torch/extension.h>\n#include "runtime/executor.h"'),
        ("runtime/executor.cpp", "#include <torch/library.h>\n#include <memory>"),
        ("base/ids.h", '// #include "graph/graph.h"\n/*\n#include <ATen/Tensor.h>\n*/'),
    ],
)
def test_allowed_cpp_includes(tmp_path, name, text):
    assert cpp_problems(write_tree(tmp_path, {name: text})) == []


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("base/ids.h", '#include "graph/graph.h"', "base may not use graph"),
        ("graph/graph.h", '#  include "schedule/action.h"', "graph may not use schedule"),
        ("memory/arena.cpp", '#include "ops/op_def.h"', "memory may not use ops"),
        ("ops/gemm.cpp", '#include "runtime/executor.h"', "ops may not use runtime"),
        ("dense/gemm.cpp", '#include "graph/graph.h"', "must not know each other"),
        ("graph/graph.h", '#include "dense/gemm.h"', "must not know each other"),
        ("dense/gemm.cpp", "#include <ATen/Tensor.h>", "dense may not include ATen"),
        (
            "dense/gemm.cpp",
            '#include <ATen/cpu/vec/vec.h>\n#include "dense/onednn.h"',
            "ATen/cpu/vec/vec.h beside oneDNN",
        ),
        ("ops/x.cpp", "#include <ATen/Parallel.h>", "ops may not include ATen/Parallel.h"),
        ("dense/x.cpp", "#include <omp.h>", "dense may not include omp.h"),
        (
            "dense/x.cpp",
            "int n = omp_get_max_threads();",
            "only threads may name omp_get_max_threads",
        ),
        ("ops/x.cpp", "  at::parallel_for(0, n, 1, f);", "only threads may name parallel_for"),
        ("runtime/x.cpp", "# pragma omp  parallel", "only threads may name # pragma omp  parallel"),
        ("threads/x.h", '#include "dense/y.h"', "threads may not use dense"),
        ("threads/x.h", '#include "graph/y.h"', "threads may not use graph"),
        ("threads/x.cpp", "#include <ATen/Tensor.h>", "threads may not include ATen/Tensor.h"),
        ("cost/cycles.cpp", '#include "c10/util/Half.h"', "cost may not include c10"),
        ("ops/gemm.cpp", "#include <torch/extension.h>", "ops may not include torch/extension.h"),
        ("ops/gemm.cpp", "#include <oneapi/dnnl/dnnl.hpp>", "ops may not include oneapi"),
        ("graph/text.cpp", '#include "graph.h"', "from the root of csrc"),
        ("graph/text.cpp", "#include <graph/graph.h>", "in quotes"),
        ("surprise/x.h", "", "surprise has no layer"),
        ("ops/surprise/x.h", "", "ops/surprise has no layer"),
        ("ops/norm/x.h", '#include "ops/softmax/y.h"', "must not know each other"),
        ("ops/operands/x.h", '#include "ops/map/y.h"', "ops/operands may not use ops/map"),
        ("ops/op_def.h", '#include "ops/math/y.h"', "ops may not use ops/math"),
        ("dense/tile/x.h", '#include "dense/vector/y.h"', "must not know each other"),
    ],
)
def test_forbidden_cpp_includes(tmp_path, name, text, problem):
    problems = cpp_problems(write_tree(tmp_path, {name: text}))
    assert [line for line in problems if problem in line and name in line]


def test_cpp_cycle_inside_a_layer(tmp_path):
    files = {"cost/c.h": '#include "schedule/s.h"', "schedule/s.h": '#include "cost/c.h"'}
    (problem,) = cpp_problems(write_tree(tmp_path, files))
    assert problem.startswith("cycle inside one layer: ")


@pytest.mark.parametrize(
    "files",
    [
        {"dense/x.h": '#include "dense/tile/y.h"', "dense/tile/y.h": '#include "dense/z.h"'},
        {
            "runtime/a/x.h": '#include "runtime/b/y.h"',
            "runtime/b/y.h": '#include "runtime/c/d/z.h"',
            "runtime/c/d/z.h": '#include "runtime/a/x.h"',
        },
        {"ops/map/x.h": '#include "ops/map/a/y.h"', "ops/map/a/y.h": '#include "ops/map/z.h"'},
    ],
)
def test_cpp_cycle_inside_a_room(tmp_path, files):
    (problem,) = cpp_problems(write_tree(tmp_path, files))
    assert problem.startswith("cycle inside one room: ")
    assert all(name in problem for name in files)


def test_cpp_rooms_inside_a_room_use_each_other_one_way(tmp_path):
    files = {
        "dense/x.h": '#include "dense/tile/y.h"\n#include "dense/problem/z.h"',
        "dense/tile/y.h": '#include "dense/problem/z.h"',
        "dense/problem/z.h": '#include "base/ids.h"',
    }
    assert cpp_problems(write_tree(tmp_path, files)) == []


def test_missing_folders_are_no_problem(tmp_path):
    assert python_problems(tmp_path / "popsim_torch") == []
    assert cpp_problems(tmp_path / "csrc") == []
