"""Options from JSON, and from a file of settings. Package private."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from contextvars import ContextVar
from enum import Enum
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from popsim_torch import enums
from popsim_torch.errors import (
    ConfigFileError,
    UsageAttributeError,
    UsageValueError,
    closest_names,
)
from popsim_torch.options.base import FreezableOptions

if TYPE_CHECKING:
    from popsim_torch.options import Options

_ENUMS: dict[str, type[Enum]] = {name: getattr(enums, name) for name in enums.__all__}

# The files that are being read, outermost first: a line of a file may load another file.
_being_applied: ContextVar[tuple[str, ...]] = ContextVar("popsim_torch_options_files", default=())


def apply_json(options: Options, text: str) -> None:
    """Apply a JSON object of setters and their arguments; see ``Options.from_json``.

    Args:
        options: The options to change.
        text: The JSON text.

    Raises:
        UsageValueError: The string is not a JSON object.
        UsageAttributeError: A setter does not exist.
    """
    try:
        settings = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageValueError(f"Options.from_json: this is not JSON: {error}.") from error
    if not isinstance(settings, dict):
        raise UsageValueError(
            f"Options.from_json: got a JSON {type(settings).__name__}. Pass an object such as "
            '{"deviceIterations": 4}.'
        )
    for accessor, value in settings.items():
        *groups, name = accessor.split(".")
        owner: FreezableOptions = options
        for group in groups:
            owner = _group(owner, group, accessor)
        arguments = value if isinstance(value, list) else [value]
        _setter(owner, name, accessor)(*(_enum_or_same(argument) for argument in arguments))


def _group(owner: FreezableOptions, name: str, accessor: str) -> FreezableOptions:
    parts = owner._parts()
    if name not in parts:
        raise UsageAttributeError(
            f"Options.from_json: '{accessor}': no group '{name}'.{_hint(name, list(parts))}"
        )
    return parts[name]


def _setter(owner: FreezableOptions, name: str, accessor: str) -> Callable[..., Any]:
    methods = [key for key in dir(type(owner)) if _is_method(owner, key)]
    if name not in methods:
        raise UsageAttributeError(
            f"Options.from_json: '{accessor}': no method '{name}'.{_hint(name, methods)}"
        )
    method: Callable[..., Any] = getattr(owner, name)
    return method


def _is_method(owner: object, name: str) -> bool:
    return not name.startswith("_") and callable(getattr(type(owner), name, None))


def _hint(name: str, candidates: list[str]) -> str:
    close = closest_names(name, candidates)
    return f" Closest name: '{close[0]}'." if close else ""


def _enum_or_same(value: Any) -> Any:
    if isinstance(value, list):
        return [_enum_or_same(item) for item in value]
    if isinstance(value, str):
        enum_name, _, member = value.partition(".")
        enum = _ENUMS.get(enum_name)
        if enum is not None and member in enum.__members__:
            return enum[member]
    return value


def apply_file(options: Options, path: str | os.PathLike[str]) -> None:
    """Run the lines of a file as Python; see ``Options.loadFromFile``.

    Args:
        options: The options to change.
        path: The file, UTF-8 text.

    Raises:
        ConfigFileError: A line is not Python, or the file is not UTF-8 text.
        UsageValueError: The file loads itself.
        OSError: The file cannot be read.
        Exception: The exception of a line.
    """
    opened, real_path = _being_applied.get(), os.path.realpath(path)
    if real_path in opened:
        chain = " -> ".join(
            os.path.basename(file) for file in (*opened[opened.index(real_path) :], real_path)
        )
        raise UsageValueError(
            f"Options.loadFromFile({str(path)!r}): the file loads itself ({chain}). Remove that "
            "line from it."
        )
    token = _being_applied.set((*opened, real_path))
    try:
        # Import here: this layer is below the public names of the package.
        package = importlib.import_module(__name__.partition(".")[0])
        names = {"options": options, "poptorch": package, "torch": torch}
        for code in _compiled_lines(path):
            exec(code, names)
    finally:
        _being_applied.reset(token)


def _compiled_lines(path: str | os.PathLike[str]) -> list[CodeType]:
    name = os.path.basename(path)
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except UnicodeDecodeError as error:
        raise ConfigFileError(f"{name} is not UTF-8 text: {error}") from error
    commands = [f"options.{line}" for line in lines if line and not line.startswith("#")]
    codes = []
    for number, command in enumerate(commands, start=1):
        try:
            codes.append(compile(command, name, "exec"))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else str(error)
            raise ConfigFileError(
                f"SyntaxError at line {number} of {name}: {reason}\n> {command}"
            ) from None
    return codes
