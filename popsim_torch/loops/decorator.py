"""``poptorch.function`` as a decorator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from popsim_torch.loops.function import Function
from popsim_torch.options import Options

__all__ = ["function"]

P = ParamSpec("P")
R = TypeVar("R")


@overload
def function(
    python_function: Callable[P, R], /, *, options: Options | None = None
) -> Function[P, R]: ...
@overload
def function(*, options: Options | None = None) -> Callable[[Callable[P, R]], Function[P, R]]: ...
def function(
    python_function: Callable[..., Any] | None = None, /, *, options: Options | None = None
) -> Any:
    """Let the loops of a function run on the device.

    The decorated function runs once, to record its loops (``repeat``, ``while_loop``) and the torch
    functions that it calls outside of them. The host computes those calls, in each call.

    Args:
        python_function: The function to decorate.
        options: The options of the loops' programs: anchors, precision, stages and so on.

    Returns:
        A :class:`Function`, or a decorator that makes one.
    """
    if python_function is None:
        return functools.partial(Function, options=options)
    return Function(python_function, options)
