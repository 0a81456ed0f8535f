"""Shows the READMEs of the tutorials, with their pictures, as pages: a Sphinx extension."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def page(name: str) -> str:
    """Return the text of a tutorial's page: its README, whose links lead to where the site has it.

    Args:
        name: Of the tutorial's folder.
    """
    folder = ROOT / "tutorials" / name
    text = (folder / "README.md").read_text(encoding="utf-8")

    def moved(link: re.Match[str]) -> str:
        return f"]({_on_site((folder / link[1]).resolve())}{link[2] or ''})"

    return _LINK.sub(moved, text)


def _on_site(file: Path) -> str:
    """Return the way from a tutorial's page to a file, or to the page that shows it."""
    path = file.relative_to(ROOT)
    if path.name == "README.md" and path.parts[0] == "tutorials":
        return f"{path.parts[1]}.md"
    if path.parts[0] == "docs":
        return f"../{path.relative_to('docs')}"
    return f"../../{path}"  # a picture, or a script to download


def setup(app: Any) -> dict[str, bool]:
    """Fill the pages in ``tutorials`` when Sphinx reads them."""

    def fill(_: Any, docname: str, content: list[str]) -> None:
        folder, _, name = docname.rpartition("/")
        if folder == "tutorials":
            content[0] = page(name)

    app.connect("source-read", fill)
    return {"parallel_read_safe": True}
