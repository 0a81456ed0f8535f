"""Writes a notebook for each tutorial from its README: ``notebooks.py`` writes all of them.

The text of the README becomes text, a block of Python a cell, and a command that runs a script
becomes ``%run``. The values of its flags stand in one cell at the top of the notebook: change them,
and run the cells below again.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbformat

TUTORIALS = Path(__file__).parents[1] / "tutorials"
PARAMETERS = "parameters"
"""The tag of the cell with the values of flags, as papermill knows it."""

# Else jupytext takes the language of most blocks for that of the notebook.
_HEADER = """---
jupyter:
  kernelspec:
    display_name: Python 3
    language: python
    name: python3
---
"""
_BASH = "%%bash\n"
_CONTINUES = "# Continues the blocks above.\n"
_SCRIPT = re.compile(r"(?:\S*/)?python (?P<script>\w+\.py)(?P<flags>.*)")
_LINK = re.compile(r"^This page is also a notebook: .*\n\n", re.MULTILINE)
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def names() -> list[str]:
    """Return the folders of the tutorials."""
    return sorted(readme.parent.name for readme in TUTORIALS.glob("*/README.md"))


def path(name: str) -> Path:
    """Return where a tutorial's notebook is."""
    return TUTORIALS / name / f"{name}.ipynb"


def text(name: str) -> str:
    """Return what the notebook's file holds; the same README gives the same bytes.

    Args:
        name: The tutorial's folder.
    """
    readme = (TUTORIALS / name / "README.md").read_text(encoding="utf-8")
    readme = _LINK.sub("", readme)
    read = jupytext.reads(_HEADER + readme, fmt="md")
    made = nbformat.v4.new_notebook(metadata={"kernelspec": read.metadata["kernelspec"]})
    parameters: dict[str, str] = {}
    for cell in read.cells:
        made.cells += _cells(cell, parameters)
    if parameters:
        values = "\n".join(f"{name} = {value}" for name, value in parameters.items())
        source = f"# Change values here, and run the cells below again.\n{values}"
        chosen = nbformat.v4.new_code_cell(source, metadata={"tags": [PARAMETERS]})
        made.cells.insert(1, chosen)
    for number, cell in enumerate(made.cells):
        cell.id = hashlib.sha256(f"{name} {number}".encode()).hexdigest()[:8]
    nbformat.validate(made)
    return nbformat.writes(made) + "\n"


def _cells(cell: Any, parameters: dict[str, str]) -> Iterator[Any]:
    """Yield the cells that a block of the README becomes; note the flags of its commands."""
    if cell.cell_type == "markdown":
        yield nbformat.v4.new_markdown_cell(cell.source)
    elif not cell.source.startswith(_BASH):
        yield nbformat.v4.new_code_cell(cell.source.removeprefix(_CONTINUES))
    else:
        lines = cell.source.removeprefix(_BASH).splitlines()
        lines = [line for line in lines if not line.startswith("cd ")]
        matches = [_SCRIPT.fullmatch(line) for line in lines]
        if all(matches):
            for match in filter(None, matches):
                yield from _runs(match["script"], shlex.split(match["flags"]), parameters)
        elif lines:
            yield nbformat.v4.new_code_cell(_BASH + "\n".join(lines))


def _runs(script: str, flags: list[str], parameters: dict[str, str]) -> Iterator[Any]:
    """Yield the cell that runs a script, and one that shows the picture that it writes."""
    shown: list[str] = []
    pictures = []
    for before, flag in zip(["", *flags], flags, strict=False):
        if before.startswith("--") and not flag.startswith("--"):
            name = before.removeprefix("--").replace("-", "_").upper()
            value = flag if _NUMBER.fullmatch(flag) else repr(flag)
            name = _free_name(name, script, value, parameters)
            parameters[name] = value
            shown.append(f"{{{name}}}")
            if flag.endswith(".png"):
                pictures.append(name)
        else:
            shown.append(flag)
    yield nbformat.v4.new_code_cell(" ".join(["%run", script, *shown]))
    for name in pictures:
        yield nbformat.v4.new_code_cell(f"from IPython.display import Image\n\nImage({name})")


def _free_name(flag: str, script: str, value: str, parameters: dict[str, str]) -> str:
    """Return the name of a parameter that has this value, or that there is not yet."""
    own = f"{Path(script).stem.upper()}_{flag}"
    names = (flag, own, *(f"{own}_{number}" for number in range(2, len(parameters) + 2)))
    return next(name for name in names if parameters.get(name, value) == value)


def main() -> None:
    """Write all notebooks."""
    for name in names():
        path(name).write_text(text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
