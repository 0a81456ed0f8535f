"""The Python examples of a page, and a script that runs them: ``examples.py page``.

A block contains its imports and runs alone; or its first line says that it continues the blocks
before it on the page. A ``text`` block directly after it contains its output.
"""

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import NamedTuple

import torch

CONTINUES = "# Continues the blocks above.\n"
_BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)


class Example(NamedTuple):
    """A block of a page."""

    code: str
    printed: str | None


def examples(page):
    """Return the blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [Example(one["code"], one["printed"]) for one in _BLOCK.finditer(text)]


def run(page):
    """Run the blocks of a page exactly as they are printed.

    Raises:
        AssertionError: The output of a block differs from the page.
    """
    torch.manual_seed(0)
    above = {}
    for example in examples(page):
        alone = not example.code.startswith(CONTINUES)
        names = {"__name__": "__main__"} if alone else dict(above)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(example.code, page.name, "exec"), names)
        above |= names
        if example.printed is not None and printed.getvalue().split() != example.printed.split():
            raise AssertionError(f"{example.code}\nprints\n{printed.getvalue()}")


if __name__ == "__main__":
    run(Path(sys.argv[1]))
