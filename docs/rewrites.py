"""Shows all rewrites of the host passes as a table, in the page ``how_it_works``."""

from __future__ import annotations

from typing import Any

from popsim_torch.passes.pipeline import REWRITES


def as_markdown() -> str:
    """Return the table."""
    rows = [f"| {one.name} | {one.does.replace('``', '`')} |" for one in REWRITES]
    return "\n".join(["| What comes out | What it joins |", "|---|---|", *rows])


def setup(app: Any) -> dict[str, bool]:
    """Fill the page when Sphinx reads it."""

    def fill(_: Any, page: str, content: list[str]) -> None:
        if page == "how_it_works":
            content[0] = content[0].replace("<!-- the rewrites -->", as_markdown())

    app.connect("source-read", fill)
    return {"parallel_read_safe": True}
