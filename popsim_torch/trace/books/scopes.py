"""The scope at the beginning of names: the modules that are being called, and users' scopes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

__all__ = ["Scopes"]


class Scopes:
    """The scopes of one trace.

    Args:
        module: The model, whose modules have scopes; None if calls of modules open no scopes.
        is_followed: Returns whether a call of a module belongs to the trace.
    """

    def __init__(self, module: nn.Module | None, is_followed: Callable[[], bool]) -> None:
        named = () if module is None else module.named_modules()
        self._paths = {id(child): name.replace(".", "/") for name, child in reversed(list(named))}
        self._is_followed = is_followed
        self._scopes: list[str] = [""]

    @property
    def current(self) -> str:
        """Return the scope of the current call."""
        return self._scopes[-1]

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Append ``name`` to the current scope."""
        outer = self._scopes[-1]
        self._scopes.append(f"{outer}/{name}" if outer else name)
        try:
            yield
        finally:
            self._scopes.pop()

    @contextmanager
    def following_modules(self) -> Iterator[None]:
        """Follow the calls of modules in this scope."""
        if not self._paths:
            yield
            return
        called: list[nn.Module] = []

        def enter(module: nn.Module, _args: object) -> None:
            if id(module) in self._paths and self._is_followed():
                caller = self._paths[id(called[-1])] if called else ""
                called.append(module)
                self._scopes.append(self._inner_scope(caller, self._paths[id(module)]))

        def leave(module: nn.Module, _args: object, _result: object) -> None:
            if called and called[-1] is module and self._is_followed():
                called.pop()
                self._scopes.pop()

        handles = (
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _inner_scope(self, caller: str, path: str) -> str:
        """Return the scope of a module that ``caller`` calls in the current scope."""
        scope = self._scopes[-1]
        if path == caller:
            return scope
        if caller and not path.startswith(f"{caller}/"):
            return path
        step = path[len(caller) :].lstrip("/")
        return f"{scope}/{step}" if scope else step
