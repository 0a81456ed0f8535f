"""The exception classes of popsim_torch, and helpers for consistent messages.

A program that catches ``Error`` catches every mistake this package reports. Where PopTorch raises
one of Python's own exceptions instead, the class is a subclass of both (``UsageValueError`` is an
``Error`` and a ``ValueError``), so either ``except`` clause works.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from popsim_torch.verdict import Verdict

__all__ = [
    "BadNumberError",
    "ConfigFileError",
    "Error",
    "InternalError",
    "NoLossError",
    "PopsimError",
    "RecoverableError",
    "UnrecoverableError",
    "UsageAssertionError",
    "UsageAttributeError",
    "UsageError",
    "UsageKeyError",
    "UsageRuntimeError",
    "UsageTimeoutError",
    "UsageTypeError",
    "UsageValueError",
    "closest_names",
    "createPoptorchError",
    "example_names",
    "listed_names",
    "not_supported_yet",
]

PYTHON_ERROR_TYPE = "poptorch_py_error"
BACKEND_ERROR_TYPE = "poptorch_cpp_error"
LONG_MESSAGE_FILE = "poptorch_error.log"
_MAX_LINES = 80


class Error(Exception):
    """The base class of all errors that popsim_torch raises on purpose.

    A message of more than 80 lines is written to ``poptorch_error.log`` in the working directory,
    and the error names that file instead.

    Args:
        message: What happened, without context.
        error_type: Which part of the system raised it.
        location: The calls that led here, innermost first, or an empty string.
        source: File and line of the code that found it, ``file:line``, or an empty string.

    Attributes:
        args: A tuple of one string, which ``str`` returns.
    """

    message: str
    """The message as given, or a shorter one that names the file of a long message."""
    type: str
    """The ``error_type`` given."""
    location: str
    """As given."""
    source: str
    """As given."""
    history: Any
    """The ``History`` of the ``fit`` that the error ended; other errors do not have it."""

    def __init__(
        self,
        message: str = "",
        *,
        error_type: str = PYTHON_ERROR_TYPE,
        location: str = "",
        source: str = "",
    ) -> None:
        self.message = _written_if_long(message)
        self.type = error_type
        self.location = location
        self.source = source
        super().__init__(str(self))

    def __str__(self) -> str:
        where = f"In {self.source}: " if self.source else ""
        return self._with_context(f"{where}'{self.type}': {self.message}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message,), self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any] | None) -> None:
        self.__dict__.update(state or {})
        self.args = (str(self),)

    def _with_context(self, text: str) -> str:
        return f"{text}\nError raised in:\n{self.location}" if self.location else text


PopsimError = Error
"""The package's own name for :class:`Error`."""


def _written_if_long(message: str) -> str:
    """Return a message; write one with too many lines to a file, and return where it is."""
    num_lines = message.count("\n") + 1
    if num_lines <= _MAX_LINES:
        return message
    path = os.path.abspath(LONG_MESSAGE_FILE)
    try:
        with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{message}\n")
    except OSError:
        return message
    first = message.split("\n", 1)[0]
    return f"{first} ... See {path} for the whole message of {num_lines} lines."


class RecoverableError(Error):
    """The (simulated) machine failed, and a reset makes it usable again.

    Args:
        message: What happened, without context.
        recovery_action: ``IPU_RESET``, ``LINK_RESET``, ``PARTITION_RESET`` or ``FULL_RESET``.
        error_type: Which part of the system raised it.
        location: The calls that led here, innermost first, or an empty string.
        source: File and line of the code that found it, ``file:line``, or an empty string.

    Attributes:
        recovery_action: As given.
    """

    def __init__(
        self,
        message: str = "",
        recovery_action: str = "",
        *,
        error_type: str = PYTHON_ERROR_TYPE,
        location: str = "",
        source: str = "",
    ) -> None:
        self.recovery_action = recovery_action
        super().__init__(message, error_type=error_type, location=location, source=source)

    def _with_context(self, text: str) -> str:
        if self.recovery_action:
            text += f"\nRecovery action: {self.recovery_action}"
        return super()._with_context(text)


class UnrecoverableError(Error):
    """The (simulated) machine failed, and no reset makes it usable again."""


class BadNumberError(Error):
    """A number of a model became NaN or infinite, and ``Options.watch`` ends the call.

    Args:
        message: The verdict as a text.
        verdict: Where the number came from.

    Attributes:
        verdict: As given.
    """

    def __init__(self, message: str, verdict: Verdict) -> None:
        self.verdict = verdict
        super().__init__(message)

    def __str__(self) -> str:
        return self._with_context(self.message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.verdict), self.__dict__.copy()


class RecordError(Error):
    """A record met the condition ``when`` of ``Options.observe``, and ends the call.

    Args:
        message: What happened.
        record: The record.

    Attributes:
        record: As given.
    """

    def __init__(self, message: str, record: Any) -> None:
        self.record = record
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.record), self.__dict__.copy()


class InternalError(Error):
    """A bug of popsim_torch itself, never a mistake of the user's program."""

    def __str__(self) -> str:
        return (
            f"{super().__str__()}\nThis is a bug in popsim_torch, not in your program. "
            "Please report it, with this message and the smallest program that shows it."
        )


class NoLossError(Error):
    """A model that is compiled for training computes no loss."""


class ConfigFileError(Exception):
    """A line of an options file is not a setting; see ``Options.loadFromFile``."""


class UsageError(Error):
    """The base of the errors that are also a built-in exception; prints only the message."""

    def __str__(self) -> str:
        return self._with_context(self.message)


class UsageAssertionError(UsageError, AssertionError):
    """A mistake for which PopTorch raises ``AssertionError``."""


class UsageAttributeError(UsageError, AttributeError):
    """A mistake for which PopTorch raises ``AttributeError``."""


class UsageKeyError(UsageError, KeyError):
    """A mistake for which PopTorch raises ``KeyError``; prints its message unquoted."""


class UsageRuntimeError(UsageError, RuntimeError):
    """A mistake for which PopTorch raises ``RuntimeError``."""


class UsageTimeoutError(UsageError, TimeoutError):
    """Something that the program waited for did not come in time."""


class UsageTypeError(UsageError, TypeError):
    """A mistake for which PopTorch raises ``TypeError``."""


class UsageValueError(UsageError, ValueError):
    """A mistake for which PopTorch raises ``ValueError``."""


def createPoptorchError(msg: str) -> Error:
    """Return (not raise) an :class:`Error` of the Python side.

    Args:
        msg: What happened.
    """
    return Error(msg)


def closest_names(name: str, candidates: Iterable[str], limit: int = 5) -> list[str]:
    """Return the names that are most similar to a misspelt one, best first.

    Args:
        name: The name that was not found.
        candidates: The names that exist.
        limit: The largest number of names to return; at least 1.

    Raises:
        ValueError: ``limit`` is below 1.
    """
    return difflib.get_close_matches(name, list(candidates), n=limit)


def example_names(name: str, candidates: Iterable[str], limit: int = 5) -> list[str]:
    """Return some of the existing names as examples, if none is similar to a misspelt one.

    Args:
        name: The name that was not found.
        candidates: The names that exist.
        limit: The largest number of names to return.

    Returns:
        The names that have most words in common with ``name``; if no name has any, names from all
        parts of the list.
    """

    def words(text: str) -> set[str]:
        return set(re.findall(r"[a-z]+|[0-9]+", text.lower()))

    listed, wanted = list(candidates), words(name)
    alike = sorted(listed, key=lambda other: -len(words(other) & wanted))[:limit]
    alike = [other for other in alike if words(other) & wanted]
    return alike or listed[:: max(1, len(listed) // limit)][:limit]


def listed_names(names: Iterable[str], limit: int = 10) -> str:
    """Return names as part of a sentence: ``'a', 'b' and 'c'``, or some and how many more.

    Args:
        names: All names.
        limit: The largest number of names to list.
    """
    shown = [f"'{name}'" for name in names]
    if len(shown) > limit:
        return f"{', '.join(shown[:limit])} and {len(shown) - limit} more"
    return " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))


def not_supported_yet(call: str, feature: str, advice: str, note: str = "") -> Error:
    """Return the error for a part of PopTorch's API that this version does not support yet.

    Args:
        call: The user's call, for example ``Options.replicationFactor(2)``.
        feature: What was asked for, as a singular noun.
        advice: What to do instead, as a sentence.
        note: What this version does, as a clause for brackets, or an empty string.
    """
    bracket = f" ({note})" if note else ""
    return Error(
        f"{call}: {feature} is not supported by this version of popsim_torch yet{bracket}. {advice}"
    )
