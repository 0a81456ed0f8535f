"""``Channel``: marks parts of a program by name in a trace.

A trace is written if the environment variable ``PVTI_OPTIONS`` turns it on, for example
``{"enable": "true", "directory": "reports"}``: by ``libpvti`` of Graphcore's SDK, for PopVision, if
that is installed, and otherwise as ``<directory>/popsim_host__<date>__<time>__<pid>.trace.json``,
which Perfetto and Chrome open. Without the variable the marks do nothing, and cost almost no time.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import json
import os
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar

from popsim_torch import host_trace
from popsim_torch.errors import UsageValueError

__all__ = ["Channel"]

T = TypeVar("T")

_NOTHING = nullcontext()


class Channel:
    """A row of the trace.

    Args:
        name: The name of the row.

    Attributes:
        is_shown: Whether a trace is being written.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._library = _trace_library()
        self.is_shown = self._library is not None
        self._channel = None if self._library is None else self._library.createTraceChannel(name)

    def tracepoint(self, name: str) -> AbstractContextManager[Any]:
        """Return a context manager whose time the trace shows as ``<channel>.<name>``.

        Args:
            name: The name of the work that is done inside.
        """
        if self._library is None:
            return _NOTHING
        point: AbstractContextManager[Any] = self._library.Tracepoint(
            self._channel, f"{self._name}.{name}"
        )
        return point

    def instrument(self, obj: T, *method_names: str) -> T:
        """Show the calls of some methods of an object in the trace.

        Args:
            obj: The object, which is changed: its methods are wrapped, or its class is replaced by
                one derived from it where Python looks methods up in the class.
            *method_names: The names of the methods. Names that the object does not have, and
                methods that this channel already shows, are ignored.

        Returns:
            The object.
        """
        if self._library is None:
            return obj
        kind = type(obj)
        in_class = {}
        for name in method_names:
            method = getattr(obj, name, None)
            if method is None or getattr(method, "channel_name", None) == self._name:
                continue
            if name.startswith("__"):
                in_class[name] = self._traced(name, getattr(kind, name))
            else:
                setattr(obj, name, self._traced(name, method))
        if in_class:
            in_class["__reduce_ex__"] = _reduce_as_base
            with suppress(TypeError):  # (objects of built-in types cannot be changed)
                obj.__class__ = type(kind.__name__, (kind,), in_class)
        return obj

    def _traced(self, name: str, method: Any) -> Any:
        @functools.wraps(method)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with self.tracepoint(name):
                return method(*args, **kwargs)

        traced.channel_name = self._name  # type: ignore[attr-defined]
        return traced


def _reduce_as_base(self: Any, protocol: Any) -> Any:
    """Make copies and pickles have the class that the object had before."""
    derived = type(self)
    base: Any = derived.__bases__[0]
    reduced: Any = base.__reduce_ex__(self, protocol)
    # (with the usual function, pickle requires the object's own class)
    make = _new if reduced[0] is copyreg.__newobj__ else reduced[0]  # type: ignore[attr-defined]
    return make, tuple(base if item is derived else item for item in reduced[1]), *reduced[2:]


def _new(kind: Any, *arguments: Any) -> Any:
    return kind.__new__(kind, *arguments)


def _trace_library() -> Any:
    options = os.environ.get("PVTI_OPTIONS")
    if not options:
        return None
    try:
        return importlib.import_module("libpvti")
    except ImportError:
        return host_trace.wanted(_settings(options))


def _settings(options: str) -> dict[str, Any]:
    try:
        settings = json.loads(options)
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise UsageValueError(
            f"The environment variable PVTI_OPTIONS is {options!r}. It has to be a JSON object "
            'such as {"enable": "true", "directory": "reports"}, or unset.'
        )
    return settings
