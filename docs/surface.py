"""A Sphinx directive that shows ``surface.toml`` as tables, and the reader of that file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

FILE = Path(__file__).with_name("surface.toml")
STATES = ("acts", "accepted", "refused")


@dataclass(frozen=True)
class Name:
    """A public name of PopTorch."""

    path: str  # from the package on
    state: str
    reason: str


def groups() -> Iterator[tuple[str, list[Name]]]:
    """Yield the title and the names of each group."""
    with FILE.open("rb") as file:
        data = tomllib.load(file)
    for group in data["group"]:
        prefix = f"{group['object']}." if group["object"] else ""
        yield (
            group["title"],
            [
                Name(prefix + name, state, dict(group[state])[name] if state != "acts" else "")
                for state in STATES
                for name in group.get(state, ())
            ],
        )


def as_markdown() -> str:
    """Return the tables, and how many names each state has."""
    listed = list(groups())
    lines: list[str] = []
    for title, names in listed:
        acting = sorted(name.path for name in names if name.state == "acts")
        others = sorted(
            (name for name in names if name.state != "acts"),
            key=lambda name: (STATES.index(name.state), name.path),
        )
        lines += [f"## {title}", ""]
        if acting:
            lines += ["Act: " + ", ".join(f"`{path}`" for path in acting) + ".", ""]
        if others:
            lines += ["| Name | | Why |", "|---|---|---|"]
            lines += [f"| `{name.path}` | {name.state} | {name.reason} |" for name in others]
            lines.append("")
    states = [name.state for _, names in listed for name in names]
    counts = ", ".join(f"{states.count(state)} {state}" for state in STATES)
    return "\n".join([f"Of {len(states)} names: {counts}.", "", *lines])


def setup(app: Any) -> dict[str, bool]:
    """Fill the page `names` when Sphinx reads it."""

    def fill(_: Any, page: str, content: list[str]) -> None:
        if page == "names":
            content[0] = content[0].replace("<!-- the tables -->", as_markdown())

    app.connect("source-read", fill)
    return {"parallel_read_safe": True}
