"""Comments name files that exist."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    path
    for folder in ("csrc", "popsim_torch")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".h", ".cpp", ".py", ".pyi")
]
# A file name, with or without a folder.
_FILE = re.compile(r"[\w*./-]*\w\*?\.(?:h|cpp|py|pyi|md|toml|txt)\b")
_INCLUDE = re.compile(r'#\s*include\s*[<"]([^>"]+)[>"]')
# Files of other projects, and invented ones.
_OTHERS = {"asm/prctl.h", "net.py", "script.py", "03_lower.txt"}


def files() -> list[str]:
    """Return the path of every file that a comment may name."""
    folders = ("csrc", "popsim_torch", "tests", "docs", "benchmarks", "tutorials")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    return [f"/{path.relative_to(ROOT).as_posix()}" for path in [*found, *ROOT.glob("*.*")]]


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments of a file, and docstrings, with their lines."""
    text = path.read_text()
    if path.suffix in (".h", ".cpp"):
        for number, line in enumerate(text.splitlines(), 1):
            yield number, line.partition("//")[2]
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.lineno, str(node.value.value)


def vanished(path: Path, known: list[str]) -> Iterator[str]:
    """Yield the files that comments name and that do not exist."""
    included = [f"/{name}" for name in _INCLUDE.findall(path.read_text())]
    for line, comment in comments(path):
        for name in _FILE.findall(comment):
            exists = any(fnmatch(file, f"*/{name}") for file in (*known, *included))
            if not exists and name not in _OTHERS:
                yield f"{path.relative_to(ROOT)}:{line}: {name}"


def test_files_that_comments_name_exist() -> None:
    known = files()
    assert [problem for path in SOURCES for problem in vanished(path, known)] == []


@pytest.mark.parametrize(
    ("suffix", "text", "problems"),
    [
        (".h", "// As in here.h, not in gone.h.\n", ["gone.h"]),
        (".h", "#include <far/away.h>\nint i;  // away.h; gone/away.h\n", ["gone/away.h"]),
        (".py", "# see here.h and gone.py\n", ["gone.py"]),
        (".py", '"""One in a*/here.h, one in ``b/gone*.md``."""\n', ["b/gone*.md"]),
        (".py", 'text = "gone.h"\n', []),
    ],
)
def test_what_is_found(
    suffix: str, text: str, problems: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / f"file{suffix}"
    path.write_text(text)
    found = [problem.split(": ")[1] for problem in vanished(path, ["/aaa/here.h"])]
    assert found == problems
