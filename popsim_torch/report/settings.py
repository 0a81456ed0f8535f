"""The engine options that ask for reports, and what they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from popsim_torch import logs
from popsim_torch.errors import UsageValueError, closest_names

__all__ = ["Outputs", "read_settings"]

_PREFIX = "autoReport."
_ALL = "autoReport.all"
_GRAPH = "autoReport.outputGraphProfile"
_EXECUTION = "autoReport.outputExecutionProfile"
_DEBUG = "autoReport.outputDebugInfo"
_OUTPUTS = (_GRAPH, _EXECUTION, _DEBUG)
_DIRECTORY = "autoReport.directory"
_RUNS = "autoReport.executionProfileProgramRunCount"
_OUT_OF_MEMORY = "debug.allowOutOfMemory"
_NOT_WRITTEN = {
    "autoReport.outputArchive": "archive.a",
    "autoReport.outputSerializedGraph": "the serialised graph",
    "autoReport.outputLoweredVars": "lists of lowered variables",
}
_STREAM = "autoReport.streamAtEachRun"
_KNOWN = (_ALL, *_OUTPUTS, _DIRECTORY, _RUNS, _OUT_OF_MEMORY, *_NOT_WRITTEN, _STREAM)
_DEFAULT_RUNS = 2
_FALSE, _TRUE = ("false", "0"), ("true", "1")


@dataclass(frozen=True)
class Outputs:
    """What reports of a program have.

    Attributes:
        directory: The folder that has a folder for each program.
        graph: Whether they have the program, its memory and its estimate: ``report.html``.
        execution: Whether they have calls of the program: ``trace.json``.
        debug: Whether they have the module and the line of code of each op: ``debug.json``.
        runs: How many calls are recorded.
    """

    directory: Path
    graph: bool
    execution: bool
    debug: bool
    runs: int


def read_settings(settings: Mapping[str, object]) -> Outputs | None:
    """Return what the engine options ask for; None if they ask for no report.

    Options without effect are told once for each, a misspelt one with the nearest name.

    Args:
        settings: The engine options, by name; values are strings, as in ``POPLAR_ENGINE_OPTIONS``,
            or the numbers and flags that they mean.

    Raises:
        UsageValueError: An option has a value that it cannot have.
    """
    _tell_ineffective(settings)
    default = _flag(settings, _ALL, False)
    graph, execution, debug = (_flag(settings, name, default) for name in _OUTPUTS)
    if not (graph or execution or debug):
        return None
    return Outputs(
        # An absolute path: a program may change its working directory.
        directory=Path(str(settings.get(_DIRECTORY, "."))).absolute(),
        graph=graph,
        execution=execution,
        debug=debug,
        runs=_count(settings, _RUNS, _DEFAULT_RUNS),
    )


def _flag(settings: Mapping[str, object], name: str, default: bool) -> bool:
    text = str(settings.get(name, default)).lower()
    if text not in _TRUE + _FALSE:
        raise UsageValueError(
            f"The engine option '{name}' is {settings[name]!r}. It has to be 'true' or 'false'."
        )
    return text in _TRUE


def _count(settings: Mapping[str, object], name: str, default: int) -> int:
    value = settings.get(name, default)
    text = str(value)
    if isinstance(value, bool) or not text.isdecimal():
        raise UsageValueError(
            f"The engine option '{name}' is {value!r}. It has to be a number of runs, such as "
            f"'{default}'."
        )
    return int(text)


def _tell_ineffective(settings: Mapping[str, object]) -> None:
    """Warn of engine options that ask for something and have no effect; once for each option."""
    for name, value in settings.items():
        if str(value).lower() in _FALSE or name in (_OUT_OF_MEMORY, _DIRECTORY, _RUNS):
            continue
        if name in _NOT_WRITTEN:
            logs.warn_once(
                "The engine option '%s' has no effect: reports do not have %s. They have "
                "profile.pop, trace.json, report.html, debug.json and framework.json.",
                name,
                _NOT_WRITTEN[name],
            )
        elif name not in _KNOWN and name.lower().startswith(_PREFIX.lower()):
            near = closest_names(name, _KNOWN, 1)
            logs.warn_once(
                "There is no engine option '%s'; it has no effect.%s",
                name,
                f" The nearest one is '{near[0]}'." if near else "",
            )
        elif name not in (_ALL, *_OUTPUTS):
            logs.warn_once("The engine option '%s' has no effect.", name)
