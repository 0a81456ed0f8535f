"""The Python examples of README and of the pages run as they are printed, and print what they say.

A block shows its imports, and runs alone; or its first line says that it continues those above it
on the page. A ``text`` block right below is what it prints.
"""

import contextlib
import io
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).parents[2]
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


PAGES = {
    str(page.relative_to(ROOT)): page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    if examples(page)
}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")


def run(example, above):
    """Run a block with the names that those above it made; return its names and what it prints."""
    names = dict(above) if example.code.startswith(CONTINUES) else {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example.code, "<example>", "exec"), names)
    return names, printed.getvalue()


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run_as_printed(page):
    torch.manual_seed(0)
    above = {}
    for example in examples(PAGES[page]):
        names, printed = run(example, above)
        above |= names
        if example.printed is not None:
            assert printed.split() == example.printed.split()


def test_no_page_has_examples_with_prompts():
    prompted = [
        str(page.relative_to(ROOT))
        for page in (ROOT / "docs").glob("**/*.md")
        if re.search(r"^>>> |\{doctest\}|\{testcode\}", page.read_text(), re.MULTILINE)
    ]
    assert prompted == []
