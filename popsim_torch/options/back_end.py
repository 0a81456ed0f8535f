"""Checks and logs the settings of PopTorch's back end when a model is compiled.

Package private.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pprint import saferepr
from typing import TYPE_CHECKING, Any

import torch

from popsim_torch import logs
from popsim_torch.dtypes import dtype_name
from popsim_torch.errors import Error, closest_names, not_supported_yet
from popsim_torch.options.back_end_keys import (
    KEYS,
    LIMITS,
    NUM_MEMBERS,
    OVERRULED,
    PARTIALS,
    TEXT_DICTS,
)

if TYPE_CHECKING:
    from popsim_torch.options import Options

_logger = logging.getLogger("poptorch:cpp")

_PROGRESS_BAR = "compilation_progress_bar_fn"
_KINDS: tuple[tuple[str, type | tuple[type, ...]], ...] = (
    ("bool", bool),
    ("int", int),
    ("float", float),
    ("str", str),
    ("list", (list, set, tuple)),
    ("dict", dict),
)
"""The kinds of values with their types; the first type that fits is used."""


def check_back_end(options: Options) -> None:
    """Check and log the settings that a model is about to be compiled with.

    Args:
        options: All of the model's options, with an output mode.

    Raises:
        Error: A setting does not exist, has a wrong value, or would need values that popsim_torch
            does not compute.
        UsageAssertionError: ``_Popart`` holds a setting that belongs to another group.
    """
    settings = options.toDict()
    validate_options(settings)
    _check_limits(options._Popart.options, settings)
    _warn_of_overruled(options._Popart.options, settings)
    if options.exists("use_model"):
        _logger.info(
            "From the user configuration: Ipu model: %s",
            "Enabled" if options.use_model else "Disabled",
        )


def validate_options(settings: Mapping[str, Any]) -> None:
    """Check that all settings exist, and log each at level DEBUG.

    Args:
        settings: The result of ``Options.toDict``.

    Raises:
        Error: A name does not exist for the type of its value, a value has a type that no setting
            has, or a value is not a member of the setting's enum.
    """
    for key, value in settings.items():
        if key == _PROGRESS_BAR:
            continue
        kind = next((kind for kind, types in _KINDS if isinstance(value, types)), None)
        if kind is None:
            raise Error(
                f"Unknown value type {type(value).__name__} for option {key}: {saferepr(value)}. "
                "Pass a bool, an int, a float, a str, a list, a set, a tuple or a dict."
            )
        if key not in KEYS[kind]:
            raise Error(_unknown(kind, key, value))
        _check_value(kind, key, value)
        _log(kind, key, value)


def log_computed(options: Options, *, pipelined: bool) -> None:
    """Log the back-end settings that follow from the model; warn if the user overrides one.

    Args:
        options: The model's options.
        pipelined: Whether micro-batches overlap in a pipeline of several stages.
    """
    computed = {"enablePipelining": int(pipelined), **options.execution_strategy.computed_options()}
    given = options._Popart.options
    for key, value in computed.items():
        if given.get(key, value) != value:
            _logger.warning(
                "Options._Popart.set(%r, %s) overrides what follows from the model, %s. It has no "
                "effect on values.",
                key,
                saferepr(given[key]),
                saferepr(value),
            )
        elif not options.TensorLocations.exists(key):
            _logger.debug("%s set to value %s", key, value)


def check_loss_scale(options: Options, loss_dtypes: Collection[torch.dtype]) -> None:
    """Check the setting for a float32 loss scale; warn if the scale is float32 without it.

    Args:
        options: The model's options.
        loss_dtypes: The dtypes of the losses that training starts from.

    Raises:
        Error: A loss is not float32, so the scale, which is the gradient of the loss, is not
            either.
    """
    key = "ensureFp32LossScaleTensor"
    if not options._Popart.options.get(key, False) or not loss_dtypes:
        return
    call = f"Options._Popart.set('{key}', True)"
    others = [dtype_name(dtype) for dtype in loss_dtypes if dtype != torch.float32]
    if others:
        raise not_supported_yet(
            call,
            f"a float32 scale of a {others[0]} loss",
            "The scale of a loss has the loss's dtype: compute the loss in float32, loss.float(), "
            "or leave the setting out.",
        )
    logs.warn_once("%s has no effect: the loss is float32, and so is its scale.", call)


def _unknown(kind: str, key: str, value: object) -> str:
    others = [other for other, keys in KEYS.items() if key in keys]
    if others:
        hint = f" It takes a {' or a '.join(others)}."
    else:
        close = closest_names(str(key), set().union(*KEYS.values()))
        hint = f" Closest name: '{close[0]}'." if close else " Remove it."
    return f"Unknown {kind} option {key}: {saferepr(value)}.{hint}"


def _check_value(kind: str, key: str, value: Any) -> None:
    num_members = NUM_MEMBERS.get(key)
    if num_members is not None and not 0 <= value < num_members:
        raise Error(
            f"Value {value} of option {key} is out of range: use an int from 0 to "
            f"{num_members - 1}."
        )
    if key == "partialsTypeMatMuls":
        _check_partials(key, value)
    if kind == "list" and not all(isinstance(item, (int, str)) for item in value):
        raise Error(f"Unknown value type in option {key}: {saferepr(value)}. Pass ints or strings.")
    if key in TEXT_DICTS:
        for name, entry in value.items():
            if not (isinstance(name, str) and isinstance(entry, str)):
                raise Error(
                    f"Unknown value type {type(entry).__name__} for option {key}[{name!r}]: "
                    f"{saferepr(entry)}. Names and values must be strings."
                )
        if "partialsType" in value:
            _check_partials(f"{key}['partialsType']", value["partialsType"])


def _check_partials(where: str, partials: str) -> None:
    if partials not in PARTIALS:
        raise Error(
            f"Unknown partials type {partials!r} for option {where}. Use 'float' or 'half'."
        )


def _log(kind: str, key: str, value: Any) -> None:
    if not _logger.isEnabledFor(logging.DEBUG):
        return
    if kind == "dict":
        for name, entry in value.items():
            _logger.debug("poptorch.Options set %s[%s] to %s", key, name, _logged(entry))
    elif kind == "list":
        for entry in sorted(value, key=str) if isinstance(value, set) else value:
            _logger.debug("poptorch.Options added %s to %s", _logged(entry), key)
    else:
        _logger.debug("poptorch.Options set %s to value %s", key, _logged(value))


def _logged(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, int) else str(value)


def _check_limits(given: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    for key, value in given.items():
        limit = LIMITS.get(key)
        if limit is None:
            continue
        ours = settings[limit.value] if isinstance(limit.value, str) else limit.value
        if value != ours:
            call = f"Options._Popart.set({key!r}, {saferepr(value)})"
            raise not_supported_yet(
                call, "this back-end setting", f"Only {saferepr(ours)} is: {limit.reason}"
            )


def _warn_of_overruled(given: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Warn, once per process, of settings that differ from what is computed."""
    for key, limit in OVERRULED.items():
        ours = settings[limit.value] > 1 if isinstance(limit.value, str) else limit.value
        if given.get(key, ours) != ours:
            logs.warn_once(
                "Options._Popart.set(%r, %s) has no effect: %s.",
                key,
                saferepr(given[key]),
                limit.reason,
            )
