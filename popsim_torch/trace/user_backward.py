"""Python code of the user that autograd calls in a backward pass sees what forward sees.

The backward of a ``torch.autograd.Function``, the backward hooks of modules and the hooks of saved
tensors may make tensors, use tensors of the host, and print. Autograd calls them in another thread,
without the modes of forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import BackwardHook

from popsim_torch.private_torch.trees import tree_iter
from popsim_torch.trace.graph.traced_tensors import is_traced

__all__ = ["is_user_function", "observed_backward", "observed_functions"]

_Function = Callable[..., Any]
Function: Any = torch.autograd.Function
_PACKAGE = __name__.partition(".")[0]


@contextmanager
def observed_functions(after_call: Callable[[Any], None]) -> Iterator[None]:
    """Report the calls of ``torch.autograd.Function`` of the user: a mode does not see them.

    Args:
        after_call: Gets the result of a call with traced tensors.
    """
    original = vars(Function)["apply"].__func__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(cls, *args, **kwargs)
        if not _is_own(cls) and any(is_traced(value) for value in tree_iter(result)):
            after_call(result)
        return result

    Function.apply = classmethod(apply)
    try:
        yield
    finally:
        Function.apply = classmethod(original)


def is_user_function(node: Any) -> bool:
    """Return whether a node of autograd belongs to a ``torch.autograd.Function`` of the user."""
    forward_class: Any = getattr(node, "_forward_cls", None)
    return isinstance(node, BackwardCFunction) and not _is_own(forward_class)


def _is_own(function: Any) -> bool:
    """Return whether a ``torch.autograd.Function`` is none of the user's."""
    package = function.__module__.partition(".")[0]
    return package in (_PACKAGE, "torch")


@contextmanager
def observed_backward(observed: Callable[[_Function], _Function]) -> Iterator[None]:
    """Observe the user's code of backward passes in this scope, if it gets traced tensors.

    Args:
        observed: Returns a function that runs another one as a part of forward.
    """

    def wrapped(function: _Function) -> _Function:
        in_trace = observed(function)

        def call(*args: Any) -> Any:
            traced = any(is_traced(value) for value in tree_iter(args))
            return (in_trace if traced else function)(*args)

        return call

    apply: Any = BackwardCFunction.apply
    start_hook: Any = BackwardHook.__init__
    start_saved = torch.autograd.graph.saved_tensors_hooks.__init__

    def of_function(context: Any, *args: Any) -> Any:
        if _is_own(context._forward_cls):
            return apply(context, *args)
        return wrapped(lambda *gradients: apply(context, *gradients))(*args)

    def of_module(
        hook: Any, module: Any, hooks: Sequence[_Function], pre_hooks: Sequence[_Function]
    ) -> None:
        start_hook(hook, module, list(map(wrapped, hooks)), list(map(wrapped, pre_hooks)))

    def of_saved(scope: Any, pack_hook: _Function, unpack_hook: _Function) -> None:
        start_saved(scope, pack_hook, wrapped(unpack_hook))

    with (
        mock.patch.object(BackwardCFunction, "apply", of_function),
        mock.patch.object(BackwardHook, "__init__", of_module),
        mock.patch.object(torch.autograd.graph.saved_tensors_hooks, "__init__", of_saved),
    ):
        yield
