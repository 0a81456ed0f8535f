"""``exposed``: makes a method of a part a method of the object that has the part."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from popsim_torch.executor.tracebacks import shows_short_tracebacks

__all__ = ["exposed"]

P = ParamSpec("P")
R = TypeVar("R")


def exposed(
    part: str, method: Callable[Concatenate[Any, P], R]
) -> Callable[Concatenate[Any, P], R]:
    """Return a method that calls a part's method, and keeps the whole object alive during the call.

    The signature and the docstring come from the part's method.

    Args:
        part: The name of the attribute that holds the part.
        method: The method, as defined in the part's class.
    """

    @shows_short_tracebacks
    @functools.wraps(method)
    def call(whole: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(getattr(whole, part), *args, **kwargs)

    return call
