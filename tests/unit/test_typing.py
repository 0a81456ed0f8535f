"""Type checkers understand the package: ``mypy --strict`` on a user's program, and on mistakes."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import popsim_torch
from tests.unit.docs_extensions import PUBLIC

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "typing" / "user_program.py"
MISTAKES = ROOT / "tests" / "typing" / "mistakes.py"
_ERROR = re.compile(r"(?P<file>[^:]+):(?P<line>\d+): error: .*\[(?P<code>[\w-]+)\]$", re.MULTILINE)


@pytest.fixture(scope="module")
def found():
    """Return the errors that mypy finds in both files: file name, line, code."""
    cache = ROOT / ".mypy_cache" / "user_program"  # (it notices what has changed since)
    settings = ["--strict", "--config-file=", "--follow-imports=silent", f"--cache-dir={cache}"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *settings, str(PROGRAM), str(MISTAKES)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return [
        (Path(one["file"]).name, int(one["line"]), one["code"])
        for one in _ERROR.finditer(done.stdout)
    ]


def test_a_program_with_every_class_has_no_error(found):
    assert [one for one in found if one[0] == PROGRAM.name] == []


def test_every_planted_mistake_is_found(found):
    planted = [
        (MISTAKES.name, number, code)
        for number, line in enumerate(MISTAKES.read_text().splitlines(), 1)
        for code in re.findall(r"  # error: ([\w-]+)$", line)
    ]
    assert len(planted) > 20
    assert [one for one in found if one[0] == MISTAKES.name] == planted


def test_the_program_uses_every_public_class():
    used = set(re.findall(r"\bpoptorch\.([\w.]+)", PROGRAM.read_text()))
    classes = {
        path.removeprefix("popsim_torch.")
        for path, value in PUBLIC.objects().items()
        if inspect.isclass(value) and not value.__name__.startswith("_")
    }
    reached = {name for name in classes if any(f"{one}.".startswith(f"{name}.") for one in used)}
    assert classes - reached == set()


def test_packages_say_that_they_are_typed():
    assert Path(popsim_torch.__file__).with_name("py.typed").is_file()
    with (ROOT / "pyproject.toml").open("rb") as file:
        data = tomllib.load(file)["tool"]["setuptools"]["package-data"]
    assert {"py.typed", "*.pyi"} <= set(data["popsim_torch"])
