"""The environment variables of PopTorch programs, and the values that they may have.

All of them are checked when the package is imported, so a mistake is reported at once. Their values
are read again where they are used, because a program may change them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from popsim_torch.errors import UsageValueError

__all__ = ["check", "flag", "ipu_model_version", "json_object", "stage_threads"]

_LEVELS = ("TRACE", "DEBUG", "INFO", "WARN", "ERR", "CRITICAL", "OFF")
_VERSIONS = {"ipu1": 1, "ipu2": 2, "ipu21": 21}


def flag(variable: str) -> bool:
    """Return whether a variable is 1.

    Raises:
        UsageValueError: It is neither 0, 1 nor empty.
    """
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise _wrong(variable, value, "0 or 1")
    return value == "1"


def json_object(variable: str) -> dict[str, Any]:
    """Return the settings in a variable, or an empty dict if it is empty.

    Raises:
        UsageValueError: It is not a JSON object.
    """
    value = os.environ.get(variable, "")
    if not value:
        return {}
    allowed = 'a JSON object such as {"name": "value"}'
    try:
        settings = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise _wrong(variable, value, f"{allowed} ({error})") from None
    if not isinstance(settings, dict):
        raise _wrong(variable, value, allowed)
    return settings


def ipu_model_version() -> int:
    """Return which IPU is simulated: 1, 2 or 21, as ``POPTORCH_IPU_MODEL_VERSION`` says.

    Raises:
        UsageValueError: The variable has another value.
    """
    variable = "POPTORCH_IPU_MODEL_VERSION"
    value = os.environ.get(variable) or "ipu2"
    if value not in _VERSIONS:
        raise _wrong(variable, value, ", ".join(_VERSIONS))
    return _VERSIONS[value]


def stage_threads() -> int:
    """Return the most threads that may run the stages of a pipeline; 0: as many as PyTorch has.

    Raises:
        UsageValueError: ``POPSIM_STAGE_THREADS`` is not a number.
    """
    _count("POPSIM_STAGE_THREADS")
    return int(os.environ.get("POPSIM_STAGE_THREADS") or 0)


def _count(variable: str) -> None:
    value = os.environ.get(variable, "")
    if value and not value.isdecimal():
        raise _wrong(variable, value, "a number")


def _one_of(variable: str, *allowed: str) -> None:
    value = os.environ.get(variable, "")
    if value and value not in allowed:
        raise _wrong(variable, value, ", ".join(allowed))


def _wrong(variable: str, value: str, allowed: str) -> UsageValueError:
    return UsageValueError(
        f"The environment variable {variable} is {value!r}. It has to be {allowed}, or unset."
    )


# POPTORCH_EXPORT_PROTO_AS_BINARY, POPTORCH_MAX_GRAPH_LEN and POPART_LOG_LEVEL are checked but have
# no effect: graphs are written as text, and the log contains neither graphs nor PopART's lines.
_CHECKS: dict[str, Callable[[str], object]] = {
    "POPTORCH_IPU_MODEL": flag,
    "POPTORCH_SMALL_IPU_MODEL": flag,
    "POPTORCH_IPU_MODEL_VERSION": lambda _: ipu_model_version(),
    "POPTORCH_WAIT_FOR_IPU": flag,
    "POPTORCH_EXPORT_PROTO_AS_BINARY": flag,
    "POPTORCH_MAX_GRAPH_LEN": _count,
    "POPART_LOG_LEVEL": lambda variable: _one_of(variable, *_LEVELS),
    "POPLAR_ENGINE_OPTIONS": json_object,
    "PVTI_OPTIONS": json_object,
    "POPSIM_CHECK_CUSTOM_OPS": flag,
    "POPSIM_STAGE_THREADS": _count,
    "POPSIM_TRACEBACK": lambda variable: _one_of(variable, "full"),
}


def check() -> None:
    """Check all variables except those that ``logs`` and ``Options`` check themselves.

    Raises:
        UsageValueError: A variable has a wrong value; the message lists the allowed values.
    """
    for variable, read in _CHECKS.items():
        read(variable)


check()
