"""The log of the package: levels, the two loggers, and the logging of uncaught exceptions.

There are two logs, as on real hardware. The Python side writes to the logger ``poptorch::python``
and to stderr. The back end, which here is the simulator, writes to the logger ``poptorch:cpp`` and
to the destination in ``POPTORCH_LOG_DEST``. Both have the same level. Modules of the package call
``logs.python.warning(...)`` and ``logs.backend.info(...)``, with the levels of :mod:`logging`, or
``logs.trace(...)`` for the back end's most detailed lines.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections import Counter
from types import TracebackType
from typing import Any, TextIO

from popsim_torch.errors import UsageError, UsageTypeError, UsageValueError

__all__ = [
    "DEBUG",
    "DEBUG_IR",
    "ERR",
    "INFO",
    "OFF",
    "TRACE",
    "TRACE_ALL",
    "WARN",
    "backend",
    "limit_repeats",
    "obey_environment",
    "python",
    "setLogLevel",
    "trace",
    "warn_once",
]

TRACE_ALL = 3
"""Everything."""
TRACE = 5
"""Every step of a call."""
DEBUG_IR = 8
"""All lines of ``DEBUG``, and the text of each program that is compiled."""
DEBUG = logging.DEBUG
INFO = logging.INFO
WARN = logging.WARNING
ERR = logging.ERROR
OFF = logging.CRITICAL + 10

_LEVELS = {"TRACE": TRACE, "DEBUG": DEBUG, "INFO": INFO, "WARN": WARN, "ERR": ERR, "OFF": OFF}
_MORE_LEVELS = {"TRACE_ALL": TRACE_ALL, "DEBUG_IR": DEBUG_IR}
_NUMBERS = {0: TRACE, 1: DEBUG, 2: INFO, 3: WARN, 4: ERR, 6: OFF}
# The name of each level in a line, and its color on a terminal. Levels in between use the one
# below.
_SHOWN = (
    (logging.CRITICAL, "critical", "\033[1;41m"),
    (logging.ERROR, "error", "\033[1;31m"),
    (logging.WARNING, "warning", "\033[1;33m"),
    (logging.INFO, "info", "\033[32m"),
    (DEBUG_IR, "debug", "\033[36m"),
    (0, "trace", "\033[37m"),
)
_PLAIN = "\033[m"
_LEVEL_VARIABLE = "POPTORCH_LOG_LEVEL"
_DESTINATION_VARIABLE = "POPTORCH_LOG_DEST"
_HANDLER = "popsim_torch"
_PRINTED = "is_printed_by_python"  # on stderr: an attribute of records
_DEFAULT_REPEATS = 4
_MAX_COUNTED = 1000  # different messages; more are not counted, to limit memory

python = logging.getLogger("poptorch::python")
"""The logger of the Python side."""
backend = logging.getLogger("poptorch:cpp")
"""The logger of the back end."""


_warned: set[str] = set()


def warn_once(text: str, *args: Any) -> None:
    """Warn on the Python side, once per process for each message."""
    line = text % args
    if line not in _warned:
        _warned.add(line)
        python.warning("%s", line)


def trace(text: str, *args: Any) -> None:
    """Write a line of the back end at level ``TRACE``; takes the arguments of ``Logger.info``."""
    backend.log(TRACE, text, *args)


def setLogLevel(level: str | int) -> None:
    """Set the lowest level that is logged.

    Args:
        level: ``"TRACE"``, ``"DEBUG"``, ``"INFO"``, ``"WARN"`` (the default), ``"ERR"`` or
            ``"OFF"``, or as a number 0, 1, 2, 3, 4 or 6. Also ``"TRACE_ALL"`` and ``"DEBUG_IR"``.

    Raises:
        UsageValueError: The level does not exist.
        UsageTypeError: ``level`` is neither a string nor an int.
    """
    number = _level(level)
    python.setLevel(number)
    backend.setLevel(number)


def _level(level: object) -> int:
    if isinstance(level, str):
        known = _LEVELS | _MORE_LEVELS
        if level not in known:
            *names, last = sorted(_LEVELS)
            raise UsageValueError(
                f"Unknown log level: {level}. Log levels are {', '.join(names)} and {last}."
            )
        return known[level]
    if isinstance(level, bool) or not isinstance(level, int):
        raise UsageTypeError(
            f"setLogLevel({level!r}): the level must be a string or an int, got "
            f"{type(level).__name__}."
        )
    if level not in _NUMBERS:
        raise UsageValueError(
            f"Invalid log level integer: {level}. Use "
            + ", ".join(
                f"{number} ({name})" for number, name in zip(_NUMBERS, _LEVELS, strict=True)
            )
            + "."
        )
    return _NUMBERS[level]


class _Repeats:
    """Counts equal warnings, to limit those of a warning in a loop.

    Lines below the level of a warning are not limited, because they are shown only on request.
    """

    def __init__(self) -> None:
        self._limit = _DEFAULT_REPEATS
        self._seen: Counter[tuple[int, str]] = Counter()

    def begin(self, limit: int) -> None:
        self._limit = limit
        self._seen.clear()

    def allow(self, level: int, text: str) -> tuple[bool, bool]:
        """Return whether to write a line, and whether it is the first that is not written."""
        if level < WARN or level >= logging.CRITICAL:
            return True, False
        if len(self._seen) > _MAX_COUNTED:
            self._seen.clear()
        self._seen[level, text] += 1
        excess = self._seen[level, text] - max(self._limit, 1)
        return excess <= 0, excess == 1


def limit_repeats(max_repeats: int) -> None:
    """Start to count equal warnings again, and write each at most this often, then a notice.

    Args:
        max_repeats: ``Options.maxRepeatLogs`` (count); values less than 1 mean 1.
    """
    for logger in (python, backend):
        for handler in logger.handlers:
            if isinstance(handler, _Handler):
                handler.repeats.begin(max_repeats)


class _Handler(logging.Handler):
    """Writes ``[time] [logger] [level] text`` to a file, or to the current stream of ``sys``.

    Args:
        stream: ``stdout``, ``stderr``, or an open file.
    """

    def __init__(self, stream: str | TextIO) -> None:
        super().__init__()
        self.set_name(_HANDLER)
        self.repeats = _Repeats()
        self._stream = stream
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line of a record, or the notice that it is not repeated any more."""
        if self._stream == "stderr" and getattr(record, _PRINTED, False):
            return
        stream = getattr(sys, self._stream) if isinstance(self._stream, str) else self._stream
        if stream is None:  # pythonw has no streams
            return
        try:
            text = self.format(record)
            write, notice = self.repeats.allow(record.levelno, text)
            if notice:
                text = (
                    "The next line has come too often; it is not repeated any more, see "
                    f"Options.maxRepeatLogs: {text}"
                )
            if write or notice:
                stream.write(_line(record, text, on_terminal=_is_terminal(stream)))
                stream.flush()
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Close the file, if it writes to one."""
        if not isinstance(self._stream, str):
            self._stream.close()
        super().close()


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")


def _line(record: logging.LogRecord, text: str, *, on_terminal: bool) -> str:
    clock = logging.Formatter().formatTime(record, "%H:%M:%S")
    level, color = next((name, color) for number, name, color in _SHOWN if record.levelno >= number)
    if on_terminal:
        level = f"{color}{level}{_PLAIN}"
    return f"[{clock}.{int(record.msecs):03}] [{record.name}] [{level}] {text}\n"


class _ReportUncaught:
    """A ``sys.excepthook`` that logs an exception and then calls the previous hook.

    The previous hook prints the exception on stderr, so the log does not print it there again.
    """

    def __init__(self, previous: Any) -> None:
        self._previous = previous

    def __call__(
        self, kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        if issubclass(kind, Exception):
            lines = traceback.format_exception_only(kind, value)
            # For a syntax error, the lines of code come before the problem: log the last line.
            text = lines[-1] if isinstance(value, SyntaxError) else "".join(lines)
            python.critical("%s", text.rstrip(), extra={_PRINTED: True})
        self._previous(kind, value, trace)


def _destination() -> str | TextIO:
    wanted = os.environ.get(_DESTINATION_VARIABLE) or "stderr"
    if wanted in ("stdout", "stderr"):
        return wanted
    try:
        return open(wanted, "a", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UsageValueError(
            f"{_DESTINATION_VARIABLE}={wanted}: this file cannot be written ({error.strerror}). "
            "Set it to stderr, stdout, or a writable file."
        ) from error


def obey_environment() -> None:
    """Set up the loggers from ``POPTORCH_LOG_LEVEL`` and ``POPTORCH_LOG_DEST``.

    Raises:
        UsageValueError: The level does not exist, or the file cannot be written.
    """
    wanted = os.environ.get(_LEVEL_VARIABLE) or "WARN"
    try:
        setLogLevel(wanted)
    except UsageError as error:
        raise UsageValueError(f"{_LEVEL_VARIABLE}={wanted}: {error.message}") from None
    for logger, stream in ((python, "stderr"), (backend, _destination())):
        # Compare class names: if the module is loaded again, earlier handlers have another class.
        for handler in [item for item in logger.handlers if item.get_name() == _HANDLER]:
            logger.removeHandler(handler)
            handler.close()
        logger.addHandler(_Handler(stream))


obey_environment()
if not isinstance(sys.excepthook, _ReportUncaught):
    sys.excepthook = _ReportUncaught(sys.excepthook)
