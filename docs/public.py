"""Checks that the reference has an entry for every public name: a Sphinx extension.

``names`` says what is public. ``make docs`` fails if the index of the pages lacks one of them;
``tests/unit/test_reference.py`` asks sooner whether each class and function is on a page.
"""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import popsim_torch

API = Path(__file__).with_name("api")
# What Python calls by itself is public where a user would look it up.
_SPECIAL = {"__call__", "__getitem__", "__iter__", "__len__", "__next__"}
_DIRECTIVE = re.compile(r"^\.\. (?:auto(?:class|function|data)):: (\S+)", re.MULTILINE)
_MODULE = re.compile(r"^\.\. currentmodule:: (\S+)", re.MULTILINE)


# Public, but not what `from popsim_torch import *` takes: Python has a function of this name.
_NOT_STARRED = ("print",)


def objects() -> dict[str, Any]:
    """Return every public class and function of the package, by its name on the pages."""
    package = popsim_torch.__name__
    found: dict[str, Any] = {}
    for name in (*popsim_torch.__all__, *_NOT_STARRED):
        value = getattr(popsim_torch, name)
        if not inspect.ismodule(value):
            found[f"{package}.{name}"] = value
    known = {id(value) for value in found.values()}
    for name in popsim_torch.__all__:
        module = getattr(popsim_torch, name)
        if inspect.ismodule(module):
            for inner in module.__all__:
                value = getattr(module, inner)
                if id(value) not in known:
                    found[f"{package}.{name}.{inner}"] = value
    for group in vars(popsim_torch.Options()).values():
        kind = type(group)
        if hasattr(popsim_torch.options, kind.__name__):
            found[f"{package}.options.{kind.__name__}"] = kind
    return found


def members(kind: type) -> Iterator[str]:
    """Yield what a public class has of this package: its own members and inherited ones.

    What it inherits from classes of PyTorch and of Python is theirs to describe.
    """
    ours = [base for base in kind.__mro__ if base.__module__.split(".")[0] == "popsim_torch"]
    named = set(kind.__members__) if issubclass(kind, Enum) else set()
    if dataclasses.is_dataclass(kind):
        named |= {field.name for field in dataclasses.fields(kind)}
    for base in ours:
        named |= {*vars(base), *vars(base).get("__annotations__", ())}
    for name in sorted(named):
        if name in _SPECIAL or not name.startswith("_"):
            yield name


def names() -> Iterator[str]:
    """Yield every public name: ``popsim_torch.Options.deviceIterations``."""
    for path, value in objects().items():
        yield path
        if inspect.isclass(value):
            for name in members(value):
                yield f"{path}.{name}"


def listed() -> set[str]:
    """Return the classes and functions that directives of the reference pages name."""
    found = set()
    for page in API.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        module = _MODULE.search(text)
        for name in _DIRECTIVE.findall(text):
            is_whole = name.startswith("popsim_torch.") or module is None
            found.add(name if is_whole else f"{module[1]}.{name}")
    return found


def setup(app: Any) -> dict[str, bool]:
    """Warn of public names that the index lacks, and leave out what Python and torch bring."""
    from sphinx import addnodes
    from sphinx.util import logging

    logger = logging.getLogger(__name__)

    def check(_: Any, env: Any) -> None:
        index = env.domaindata["py"]["objects"]
        for name in names():
            if name not in index:
                logger.warning("the reference has no entry for %s", name)

    def skip(_: Any, _kind: str, _name: str, obj: Any, _skipped: bool, _opts: Any) -> bool | None:
        if isinstance(obj, cached_property):
            obj = obj.func
        is_routine = inspect.isroutine(obj) or inspect.isgetsetdescriptor(obj)
        is_ours = str(getattr(obj, "__module__", "")).startswith(popsim_torch.__name__)
        return True if is_routine and not is_ours else None

    def unlink_builtins(_: Any, page: Any) -> None:
        """Keep ``type[Any]`` in a signature from becoming a link to ``Error.type``."""
        for reference in list(page.findall(addnodes.pending_xref)):
            if hasattr(builtins, reference["reftarget"]):
                reference.replace_self(reference.children)

    app.connect("env-check-consistency", check)
    app.connect("doctree-read", unlink_builtins)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True}
