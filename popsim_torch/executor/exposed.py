"""``exposed``: methods that an object has from its parts."""

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
    """Return a part's method as a method of the whole, which lives for as long as it runs.

    Signature and docstring are those of the part's method.

    Args:
        part: The attribute of the whole that has the part.
        method: The method, as the part's class has it.
    """

    @shows_short_tracebacks
    @functools.wraps(method)
    def call(whole: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(getattr(whole, part), *args, **kwargs)

    return call
