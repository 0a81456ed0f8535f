"""Refuses a step of a learning rate scheduler in a function, whose Python code runs only once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch.optim.lr_scheduler import LRScheduler

from popsim_torch.errors import Error
from popsim_torch.trace.graph.origin import user_line

__all__ = ["without_schedulers"]


@contextmanager
def without_schedulers(is_recorded: Callable[[], bool]) -> Iterator[None]:
    """Refuse steps of a PyTorch scheduler in code that runs only once, in this scope.

    Args:
        is_recorded: Returns whether such code is the caller.
    """
    with ExitStack() as stack:
        for kind in _kinds(LRScheduler):
            if "step" in vars(kind):
                step = _refusing(vars(kind)["step"], is_recorded)
                stack.enter_context(mock.patch.object(kind, "step", step))
        yield


def _kinds(kind: type[LRScheduler]) -> Iterator[type[LRScheduler]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _kinds(derived)


def _refusing(step: Callable[..., Any], is_recorded: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(step)
    def call(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_recorded():  # another thread
            return step(scheduler, *args, **kwargs)
        raise Error(
            f"{type(scheduler).__name__}.step() is called{user_line(' at ')} in a "
            "poptorch.function, whose Python code runs once: later calls and iterations would not "
            "step the scheduler. Call it between calls of the function; they use the values that "
            "the optimizer has then."
        )

    return call
