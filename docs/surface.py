"""A Sphinx directive that shows ``surface.toml`` as tables, and the reader of that file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

FILE = Path(__file__).with_name("surface.toml")
STATES = ("supported", "accepted", "refused")
_LIST = re.compile(r"(?P<holder>[^({\[]*)(?P<open>[({\[])(?P<items>.*)[)}\]]")
# How one item of a list is spelt: an argument, an attribute, an entry of a mapping.
_ONE_OF = {"(": "{}({})", "{": "{}{}", "[": '{}["{}"]'}


@dataclass(frozen=True)
class Name:
    """A public name of PopTorch.

    Attributes:
        path: From the package on: ``optim.SGD.accum_type`` is an attribute, ``optim.SGD(lr)`` an
            argument, ``os.environ["POPTORCH_CACHE_DIR"]`` an entry of a mapping.
        state: One of ``STATES``.
        reason: Why it is not simply supported.
    """

    path: str
    state: str
    reason: str


def expanded(entry: str) -> list[str]:
    """Return the names that an entry of the file stands for.

    ``SGD(lr, momentum)`` stands for two arguments, ``Enum.{A, B}`` for two attributes and
    ``options[a, b]`` for two entries of a mapping.
    """
    listed = _LIST.fullmatch(entry)
    if listed is None:
        return [entry]
    form = _ONE_OF[listed["open"]]
    return [form.format(listed["holder"], item.strip()) for item in listed["items"].split(",")]


def groups() -> Iterator[tuple[str, list[Name]]]:
    """Yield the title and the names of each group."""
    with FILE.open("rb") as file:
        data = tomllib.load(file)
    for group in data["group"]:
        prefix = f"{group['object']}." if group["object"] else ""
        yield (
            group["title"],
            [
                Name(
                    prefix + name,
                    state,
                    "" if state == "supported" else _reason(group, state, entry),
                )
                for state in STATES
                for entry in group.get(state, ())
                for name in expanded(entry)
            ],
        )


def _reason(group: Any, state: str, entry: str) -> Any:
    names = group[state]
    return names[entry] if isinstance(names, dict) else group["reason"]


def counted(names: list[Name]) -> str:
    """Return how many of some names are in each state, in words."""
    states = [name.state for name in names]
    return ", ".join(f"{states.count(state)} {state}" for state in STATES)


def as_markdown() -> str:
    """Return the tables, and how many names each state has."""
    listed = list(groups())
    every = [name for _, names in listed for name in names]
    lines = [f"Of {len(every)} names: {counted(every)}.", ""]
    for title, names in listed:
        supported = sorted(name.path for name in names if name.state == "supported")
        others = [name for name in names if name.state != "supported"]
        lines += [f"## {title}", "", f"{counted(names).capitalize()}.", ""]
        if supported:
            lines += [f"Supported: {_shown(supported)}.", ""]
        if others:
            lines += ["| Name | | Why |", "|---|---|---|"]
            lines += [
                f"| {_shown([name.path for name in alike])} | {state} | {reason} |"
                for (state, reason), alike in groupby(others, lambda one: (one.state, one.reason))
            ]
            lines.append("")
    return "\n".join(lines)


def _shown(paths: list[str]) -> str:
    return ", ".join(f"`{path}`" for path in paths)


def setup(app: Any) -> dict[str, bool]:
    """Fill the page `names` when Sphinx reads it."""

    def fill(_: Any, page: str, content: list[str]) -> None:
        if page == "names":
            content[0] = content[0].replace("<!-- the tables -->", as_markdown())

    app.connect("source-read", fill)
    return {"parallel_read_safe": True}
