"""What the package logs, and where: levels, the two loggers, and who hears of uncaught exceptions.

There are two logs, as a program on real hardware has them: what the Python side says goes to the
logger ``poptorch::python`` and to stderr; what the back end says, which here is the simulator, goes
to the logger ``poptorch:cpp`` and to where ``POPTORCH_LOG_DEST`` says. One level holds for both.

Modules of the package say ``logs.python.warning(...)`` and ``logs.backend.info(...)``, with the
levels of :mod:`logging`, or ``logs.trace(...)`` for the back end's most detailed lines.
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
"""What ``DEBUG`` says, and the text of each program that is compiled."""
DEBUG = logging.DEBUG
INFO = logging.INFO
WARN = logging.WARNING
ERR = logging.ERROR
OFF = logging.CRITICAL + 10

_LEVELS = {"TRACE": TRACE, "DEBUG": DEBUG, "INFO": INFO, "WARN": WARN, "ERR": ERR, "OFF": OFF}
_MORE_LEVELS = {"TRACE_ALL": TRACE_ALL, "DEBUG_IR": DEBUG_IR}
_NUMBERS = {0: TRACE, 1: DEBUG, 2: INFO, 3: WARN, 4: ERR, 6: OFF}
# The name of a line's level, and how a terminal shows it; each holds from its level upwards.
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
_MAX_COUNTED = 1000  # texts; a program that runs for weeks may warn with a number in each

python = logging.getLogger("poptorch::python")
"""The logger of the Python side."""
backend = logging.getLogger("poptorch:cpp")
"""The logger of the back end."""


_warned: set[str] = set()


def warn_once(text: str, *args: Any) -> None:
    """Warn on the Python side, unless this process has said the very same before."""
    line = text % args
    if line not in _warned:
        _warned.add(line)
        python.warning("%s", line)


def trace(text: str, *args: Any) -> None:
    """Write a line of the back end at level ``TRACE``; arguments as those of ``Logger.info``."""
    backend.log(TRACE, text, *args)


def setLogLevel(level: str | int) -> None:
    """Choose what is logged: lines of this level and of those after it.

    Args:
        level: ``"TRACE"``, ``"DEBUG"``, ``"INFO"``, ``"WARN"`` (the default), ``"ERR"`` or
            ``"OFF"``, or as a number 0, 1, 2, 3, 4 or 6. Also ``"TRACE_ALL"`` and ``"DEBUG_IR"``.

    Raises:
        UsageValueError: There is no such level.
        UsageTypeError: It is neither a string nor an int.
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
    """Counts equal warnings, so that a line in a loop does not bury the others.

    What is less than a warning is only shown to those who asked for every event, and is not
    limited.
    """

    def __init__(self) -> None:
        self._limit = _DEFAULT_REPEATS
        self._seen: Counter[tuple[int, str]] = Counter()

    def begin(self, limit: int) -> None:
        self._limit = limit
        self._seen.clear()

    def allow(self, level: int, text: str) -> tuple[bool, bool]:
        """Return whether to write a line, and whether it is the first of those not written."""
        if level < WARN or level >= logging.CRITICAL:
            return True, False
        if len(self._seen) > _MAX_COUNTED:
            self._seen.clear()
        self._seen[level, text] += 1
        excess = self._seen[level, text] - max(self._limit, 1)
        return excess <= 0, excess == 1


def limit_repeats(max_repeats: int) -> None:
    """Write equal warnings this often from now on, counted anew, and then say that no more come.

    Args:
        max_repeats: ``Options.maxRepeatLogs`` (count); less than 1 is taken for 1.
    """
    for logger in (python, backend):
        for handler in logger.handlers:
            if isinstance(handler, _Handler):
                handler.repeats.begin(max_repeats)


class _Handler(logging.Handler):
    """Writes ``[time] [logger] [level] text``, to a file or to a stream as ``sys`` has it then.

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
        """Write a record's line, or the notice that it is one too many."""
        if self._stream == "stderr" and getattr(record, _PRINTED, False):
            return
        stream = getattr(sys, self._stream) if isinstance(self._stream, str) else self._stream
        if stream is None:  # as under pythonw
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
    """A ``sys.excepthook`` that logs an exception and then does what the one before it did.

    That one prints it on stderr, where the log does not repeat it.
    """

    def __init__(self, previous: Any) -> None:
        self._previous = previous

    def __call__(
        self, kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        if issubclass(kind, Exception):
            lines = traceback.format_exception_only(kind, value)
            # The lines of a program that is no Python stand in front of what is wrong.
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
            "Set it to stderr, stdout, or a file that can be."
        ) from error


def obey_environment() -> None:
    """Set the loggers up as ``POPTORCH_LOG_LEVEL`` and ``POPTORCH_LOG_DEST`` say.

    Raises:
        UsageValueError: There is no such level, or the file cannot be written.
    """
    wanted = os.environ.get(_LEVEL_VARIABLE) or "WARN"
    try:
        setLogLevel(wanted)
    except UsageError as error:
        raise UsageValueError(f"{_LEVEL_VARIABLE}={wanted}: {error.message}") from None
    for logger, stream in ((python, "stderr"), (backend, _destination())):
        # By name: where the module is loaded anew, those before are of another class.
        for handler in [item for item in logger.handlers if item.get_name() == _HANDLER]:
            logger.removeHandler(handler)
            handler.close()
        logger.addHandler(_Handler(stream))


obey_environment()
if not isinstance(sys.excepthook, _ReportUncaught):
    sys.excepthook = _ReportUncaught(sys.excepthook)
