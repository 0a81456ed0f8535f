"""Removes PyTorch and this package from tracebacks, so that the user's own lines are visible."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

from popsim_torch import _native
from popsim_torch.errors import Error, InternalError
from popsim_torch.trace.graph.origin import is_user_code

__all__ = ["shortened", "shows_short_tracebacks"]

P = ParamSpec("P")
R = TypeVar("R")


def shortened(error: Exception, *, unless: str) -> Exception:
    """Return an exception whose traceback has only the frames of user code.

    The exception is raised again in the function of this package that the user called: that is the
    only frame of this package. An exception that may be a bug of this package keeps all frames: an
    ``InternalError``, and an exception that is not an error class of this package and has no frame
    of user code.

    Args:
        error: The exception, caught in the function that the user called.
        unless: An environment variable with its value, in shell syntax, that keeps all frames. (The
            traceback shows the line of code with this text.)
    """
    variable, _, value = unless.partition("=")
    if os.environ.get(variable) == value or isinstance(error, InternalError):
        return error
    frames = _user_frames(error.__traceback__)
    if frames is None and not isinstance(error, Error):
        return error
    if not _is_raised_by_user(error.__traceback__):
        # The internal exception that came before the message for the user.
        error.__suppress_context__ = True
        if isinstance(error.__cause__, _native.ERRORS):
            error.__cause__ = None
    return error.with_traceback(frames)


def shows_short_tracebacks(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that users call, whose exceptions have short tracebacks."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise shortened(error, unless="POPSIM_TRACEBACK=full")

    return call


def _user_frames(entry: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that is user code; None if there is none."""
    found = []
    while entry is not None:
        if is_user_code(entry.tb_frame):
            found.append(entry)
        entry = entry.tb_next
    inner: TracebackType | None = None
    for one in reversed(found):
        inner = TracebackType(inner, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return inner


def _is_raised_by_user(entry: TracebackType | None) -> bool:
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    return entry is not None and is_user_code(entry.tb_frame)
