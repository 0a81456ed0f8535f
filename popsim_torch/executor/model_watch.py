"""Notices that the modules of a compiled model would run other code now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from popsim_torch import logs
from popsim_torch.executor.registrations import num_registrations
from popsim_torch.private_torch.module_parts import hooks_of, num_hooks

__all__ = ["ModelWatch"]


class ModelWatch:
    """The modules of a model, with their modes and hooks, at the time when it was compiled.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        paths = dict(module.named_modules())
        self._paths = list(paths)
        self._modules = list(paths.values())
        self._modes = [one.training for one in self._modules]
        # (looked up in the dictionaries, where attributes are found fastest)
        self._dicts = [vars(one) for one in self._modules if "training" in vars(one)]
        self._known = [own["training"] for own in self._dicts]
        self._hooks = [_copies(one) for one in self._modules]
        # Hooks can only be removed where there are some.
        self._removable = [
            (hooks, then)
            for one, copies in zip(self._modules, self._hooks, strict=True)
            for hooks, then in zip(hooks_of(one), copies, strict=True)
            if then
        ]
        self._num_hooks = num_hooks()
        self._num_registrations = num_registrations()
        self._warned: set[str] = set()

    def check(self) -> None:
        """Warn once of other modes, of other hooks, and of other modules."""
        # The fast path of nearly all calls.
        if [own["training"] for own in self._dicts] != self._known:
            self._known = [own["training"] for own in self._dicts]
            self._warn("modes", self._changed_mode)
        if self._num_hooks != num_hooks() or (
            self._removable and any(now != then for now, then in self._removable)
        ):
            self._num_hooks = num_hooks()
            self._warn("hooks", self._changed_hooks)
        if self._num_registrations != num_registrations():
            self._num_registrations = num_registrations()
            self._warn("modules", self._changed_module)

    def _warn(self, kind: str, text: Callable[[], str | None]) -> None:
        if kind in self._warned:
            return
        found = text()
        if found is not None:
            self._warned.add(kind)
            logs.python.warning(
                "%s, but the compiled model runs as before: it was recorded when it was compiled. "
                "destroy() releases the program, and the next call compiles a new one.",
                found,
            )

    def _changed_mode(self) -> str | None:
        for path, one, mode in zip(self._paths, self._modules, self._modes, strict=True):
            if one.training != mode:
                return f"{_place(path)} is in {'evaluation' if mode else 'training'} mode now"
        return None

    def _changed_hooks(self) -> str | None:
        for path, one, then in zip(self._paths, self._modules, self._hooks, strict=True):
            if _copies(one) != then:
                return f"Hooks of {_place(path, begins=False)} were added or removed"
        return None

    def _changed_module(self) -> str | None:
        now = dict(self._module.named_modules())
        for path, one in zip(self._paths, self._modules, strict=True):
            if now.pop(path, None) is not one:
                return f"{_place(path)} was replaced or removed"
        for path in now:
            return f"{_place(path)} was added"
        return None


def _copies(module: nn.Module) -> list[Mapping[int, Any]]:
    return [dict(hooks) for hooks in hooks_of(module)]


def _place(path: str, *, begins: bool = True) -> str:
    the = "The" if begins else "the"
    return f"{the} module '{path}'" if path else f"{the} model"
