"""Functions of the user that run before and after every compilation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.utils.hooks import RemovableHandle

from popsim_torch.errors import UsageRuntimeError
from popsim_torch.ops import in_compile_hook

__all__ = ["around_compilation", "registerPostCompileHook", "registerPreCompileHook"]

_Hook = Callable[[], object]
_before: OrderedDict[int, _Hook] = OrderedDict()
_behind: OrderedDict[int, _Hook] = OrderedDict()


def registerPreCompileHook(hook: _Hook) -> RemovableHandle:
    """Call a function before every model is compiled or loaded, in the order of registration.

    Args:
        hook: Takes no arguments. ``isRunningOnIpu()`` is True in it.

    Returns:
        A handle whose ``remove()`` takes the function away again.

    Raises:
        UsageRuntimeError: ``hook`` cannot be called.
    """
    return _register(_before, hook, "registerPreCompileHook")


def registerPostCompileHook(hook: _Hook) -> RemovableHandle:
    """Call a function after every model is compiled or loaded, also after a failure.

    Args:
        hook: Takes no arguments. ``isRunningOnIpu()`` is True in it.

    Returns:
        A handle whose ``remove()`` takes the function away again.

    Raises:
        UsageRuntimeError: ``hook`` cannot be called.
    """
    return _register(_behind, hook, "registerPostCompileHook")


def _register(hooks: OrderedDict[int, _Hook], hook: _Hook, function: str) -> RemovableHandle:
    if not callable(hook):
        raise UsageRuntimeError(
            f"{function}: the hook must be callable, got a {type(hook).__name__}. Pass a function "
            "without arguments."
        )
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


@contextmanager
def around_compilation() -> Iterator[None]:
    """Call the hooks before and after the code of the ``with`` statement."""
    _call(_before)
    try:
        yield
    finally:
        _call(_behind)


def _call(hooks: OrderedDict[int, _Hook]) -> None:
    token = in_compile_hook.set(True)
    try:
        for hook in list(hooks.values()):
            hook()
    finally:
        in_compile_hook.reset(token)
