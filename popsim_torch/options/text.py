"""Options from text, JSON or a file of settings, without executing any of it. Package private.

A line of a file is parsed by Python's own parser and then interpreted here: the only things it can
reach are the setters and values of the options, the public enums, and the classes in
:data:`_CONSTRUCTORS`.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable
from contextvars import ContextVar
from enum import Enum, EnumMeta
from typing import TYPE_CHECKING, Any

from popsim_torch import enums
from popsim_torch.errors import (
    ConfigFileError,
    UsageAttributeError,
    UsageValueError,
    closest_names,
)
from popsim_torch.options.base import FreezableOptions
from popsim_torch.options.locations import TensorLocationSettings
from popsim_torch.stages import (
    ExecutionStrategy,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)

if TYPE_CHECKING:
    from popsim_torch.options import Options

_ENUMS: dict[str, type[Enum]] = {name: getattr(enums, name) for name in enums.__all__}

_CONSTRUCTORS: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        ParallelPhasedExecution,
        Phase,
        PipelinedExecution,
        SerialPhasedExecution,
        ShardedExecution,
        Stage,
        TensorLocationSettings,
    )
}

# The files that are being read, outermost first: a line of one may load another.
_being_applied: ContextVar[tuple[str, ...]] = ContextVar("popsim_torch_options_files", default=())

_WITH_METHODS = (FreezableOptions, ExecutionStrategy, Phase, Stage, TensorLocationSettings)
"""The classes whose public methods a line may call."""


def apply_json(options: Options, text: str) -> None:
    """Apply a JSON object of setters and their arguments; see ``Options.from_json``.

    Args:
        options: The options to change.
        text: The JSON text.

    Raises:
        UsageValueError: It is not a JSON object.
        UsageAttributeError: There is no such setter.
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
    """Apply a file of settings, line by line; see ``Options.loadFromFile``.

    Args:
        options: The options to change.
        path: The file, UTF-8 text.

    Raises:
        ConfigFileError: A line is not a setting, or the file is not text.
        UsageValueError: The file loads itself.
        OSError: The file cannot be read.
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
        _apply_lines(options, path)
    finally:
        _being_applied.reset(token)


def _apply_lines(options: Options, path: str | os.PathLike[str]) -> None:
    name = os.path.basename(path)
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.readlines()
    except UnicodeDecodeError as error:
        raise ConfigFileError(f"{name} is not UTF-8 text: {error}") from error
    number = 0
    for file_number, raw_line in enumerate(lines, start=1):
        line = raw_line.strip()
        if not line or line.startswith("#"):
            continue
        number += 1
        try:
            _execute(options, line)
        except _RefusedError as error:
            raise ConfigFileError(
                f"{error} at line {number} of {name} "
                f"(blank lines and comments not counted; line {file_number} with them): {line}"
            ) from None


class _RefusedError(Exception):
    """A line is not a setting; says why, without naming the line."""


class _PublicNames:
    """What the name ``poptorch`` stands for in a line."""


def _execute(options: Options, line: str) -> None:
    try:
        statements = ast.parse(f"options.{line}").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _RefusedError(f"Invalid syntax ({error.__class__.__name__})") from None
    statement = statements[0]
    if len(statements) == 1 and isinstance(statement, ast.Expr):
        if isinstance(statement.value, ast.Call):
            _evaluate(options, statement.value)
            return
    elif len(statements) == 1 and isinstance(statement, ast.Assign):
        target = statement.targets[0]
        if len(statement.targets) == 1 and isinstance(target, ast.Attribute):
            owner = _evaluate(options, target.value)
            if isinstance(owner, FreezableOptions) and not target.attr.startswith("_"):
                setattr(owner, target.attr, _evaluate(options, statement.value))
                return
    raise _RefusedError("Neither a call of a setter nor an assignment of a value")


def _evaluate(options: Options, node: ast.expr) -> Any:
    """Return the value of an expression made of literals, options and public names."""
    match node:
        case ast.Name(id="options"):
            return options
        case ast.Name(id="poptorch"):
            return _PublicNames()
        case ast.Attribute(value=value, attr=name):
            return _attribute(_evaluate(options, value), name)
        case ast.Call(func=ast.Attribute(value=value, attr=name)):
            function = _function(_evaluate(options, value), name)
            arguments = [_evaluate(options, argument) for argument in node.args]
            if any(keyword.arg is None for keyword in node.keywords):
                raise _RefusedError("'**' is not allowed")
            keywords = {k.arg: _evaluate(options, k.value) for k in node.keywords if k.arg}
            return function(*arguments, **keywords)
        case ast.List(elts=items):
            return [_evaluate(options, item) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_evaluate(options, item) for item in items)
        case ast.Dict(keys=keys, values=values):
            return {
                _dict_key(options, key): _evaluate(options, value)
                for key, value in zip(keys, values, strict=True)
            }
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise _RefusedError(
            f"'{ast.unparse(node)}' is neither a literal nor a public name"
        ) from None


def _dict_key(options: Options, key: ast.expr | None) -> Any:
    if key is None:
        raise _RefusedError("'**' is not allowed")
    return _evaluate(options, key)


def _attribute(owner: object, name: str) -> Any:
    """Return what ``owner.name`` stands for: a namespace, an enum, a member, a group or a value."""
    if isinstance(owner, _PublicNames):
        if name == "enums":
            return owner
        if name in _ENUMS:
            return _ENUMS[name]
        raise _RefusedError(f"'poptorch.{name}' is not allowed here.{_hint(name, list(_ENUMS))}")
    if isinstance(owner, EnumMeta):
        if name in owner.__members__:
            return owner[name]
        raise _RefusedError(f"{owner.__name__} has no member '{name}'")
    if isinstance(owner, FreezableOptions):
        parts = owner._parts()
        if name in parts:
            return parts[name]
        if not name.startswith("_") and not _is_method(owner, name):
            return getattr(owner, name)
    raise _RefusedError(f"'.{name}' is not allowed here")


def _function(owner: object, name: str) -> Callable[..., Any]:
    """Return the constructor or method that ``owner.name(...)`` calls."""
    if isinstance(owner, _PublicNames):
        if name in _CONSTRUCTORS:
            return _CONSTRUCTORS[name]
        raise _RefusedError(
            f"'poptorch.{name}(...)' is not allowed here.{_hint(name, list(_CONSTRUCTORS))}"
        )
    is_unknown = isinstance(owner, FreezableOptions) and not hasattr(owner, name)
    if isinstance(owner, _WITH_METHODS) and (_is_method(owner, name) or is_unknown):
        # For an unknown name this raises the options' own error, with the closest name.
        method: Callable[..., Any] = getattr(owner, name)
        return method
    raise _RefusedError(f"'.{name}(...)' is not allowed here")
