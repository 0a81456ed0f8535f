"""The names that programs take from PopTorch's compiled module."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from popsim_torch.enums import NamedIntEnum
from popsim_torch.errors import BACKEND_ERROR_TYPE, Error, RecoverableError, UnrecoverableError
from popsim_torch.options.back_end import validate_options

__all__ = ["Error", "RecoverableError", "TestErrorType", "UnrecoverableError"]


class TestErrorType(NamedIntEnum):
    """The errors that :func:`_throwTestError` can raise."""

    Poptorch = 0
    """A failure of the framework."""
    Popart = 1
    """A failure of the compiler."""
    PopartInternal = 2
    """An internal failure of the compiler."""
    Poplibs = 3
    """A failure of the codelets."""
    PoplarUnrecoverable = 4
    """A failure of the device that a reset does not fix."""
    PoplarUnknown = 5
    """A failure of the device of unknown kind."""
    PoplarRecoverableFullReset = 6
    """A failure of the device that a reset fixes."""
    PoplarLinkError = 7
    """A failure of the linker."""


TestErrorType.__test__ = False  # type: ignore[attr-defined]  # pytest must not collect it

_CONTEXT = "  [0] throwTestError"
# The type and the message of each error.
_TEST_ERRORS = {
    TestErrorType.Poptorch: (BACKEND_ERROR_TYPE, "Simulated failure of the framework"),
    TestErrorType.Popart: ("popart_exception", "Simulated failure of the compiler"),
    TestErrorType.PopartInternal: (
        "popart_internal_exception",
        "Simulated failure of the compiler's own",
    ),
    TestErrorType.Poplibs: ("poplibs_exception", "Simulated failure of the codelets"),
    TestErrorType.PoplarUnrecoverable: (
        "poplar_unrecoverable_runtime_error",
        "Simulated failure of the device that no reset cures",
    ),
    TestErrorType.PoplarUnknown: (
        "poplar_unknown_runtime_error",
        "Simulated failure of the device of unknown kind",
    ),
    TestErrorType.PoplarRecoverableFullReset: (
        "poplar_recoverable_runtime_error",
        "Simulated failure of the device that a reset cures",
    ),
    TestErrorType.PoplarLinkError: (
        "poplar_link_error",
        "Simulated failure of the linker. Output of the linker:\n-foo",
    ),
}


def _throwTestError(kind: TestErrorType) -> NoReturn:
    """Raise the error of a failing machine, to test how a program handles the error.

    Args:
        kind: The error to raise.

    Raises:
        Error: The error of ``kind``, with its class, type and recovery action.
    """
    error_type, message = _TEST_ERRORS[TestErrorType(kind)]
    where = f"{Path(__file__).name}:{sys._getframe().f_lineno}"
    if kind == TestErrorType.PoplarRecoverableFullReset:
        raise RecoverableError(
            message, "FULL_RESET", error_type=error_type, location=_CONTEXT, source=where
        )
    is_fatal = kind == TestErrorType.PoplarUnrecoverable
    raise (UnrecoverableError if is_fatal else Error)(
        message, error_type=error_type, location=_CONTEXT, source=where
    )


def _validateOptions(settings: Mapping[str, Any]) -> None:
    """Check settings as the compilation of a model does, and write them to the log.

    Args:
        settings: The settings, as ``Options.toDict`` returns them.

    Raises:
        Error: A setting is unknown, or has a wrong type.
    """
    validate_options(settings)
