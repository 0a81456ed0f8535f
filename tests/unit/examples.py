"""The examples of a page, and a program that runs them: ``examples.py page [--commands]``.

A block shows its imports, and runs alone; or its first line says that it continues those above it
on the page. A ``text`` block right below is what it prints. Commands run where the page is, or from
the project's root folder if they go to a folder of it first.
"""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch

CONTINUES = "# Continues the blocks above.\n"
_BLOCK = re.compile(
    r"^```(?P<language>python|bash)\n(?P<code>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)


class Example(NamedTuple):
    """A block of a page."""

    language: str
    code: str
    printed: str | None


def examples(page):
    """Return the blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [Example(**one.groupdict()) for one in _BLOCK.finditer(text)]


def run(page, commands=False):
    """Run the blocks of Python of a page as they are printed, and its commands if asked for.

    Raises:
        AssertionError: The output of a block differs from the page.
    """
    torch.manual_seed(0)
    above = {}
    sys.path.insert(0, str(page.parent))  # a tutorial's README imports from its scripts
    for example in examples(page):
        if example.language == "bash":
            if commands:
                run_commands(example.code, page.parent)
            continue
        alone = not example.code.startswith(CONTINUES)
        names = {"__name__": "__main__"} if alone else dict(above)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(example.code, page.name, "exec"), names)
        above |= names
        if example.printed is not None and printed.getvalue().split() != example.printed.split():
            raise AssertionError(f"{example.code}\nprints\n{printed.getvalue()}")


def run_commands(code, folder):
    """Run the commands of a block.

    Raises:
        CalledProcessError: One of them fails.
    """
    root = folder.parents[1] if code.startswith("cd ") else folder
    subprocess.run(["bash", "-e", "-c", code], cwd=root, check=True, timeout=250)


if __name__ == "__main__":
    run(Path(sys.argv[1]), commands="--commands" in sys.argv)
