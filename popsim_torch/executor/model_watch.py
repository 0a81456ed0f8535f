"""Notices that the modules of a compiled model would run other code now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from popsim_torch import logs
from popsim_torch.executor.constant_watch import Constant, ConstantWatch
from popsim_torch.executor.registrations import num_registrations
from popsim_torch.private_torch.module_parts import hooks_of, num_hooks
from popsim_torch.trace.former_values import former_values_of
from popsim_torch.trace.kept_objects import OF_MODULES

__all__ = ["ModelWatch", "warn_of_later_attributes"]

_CALLS_PER_VALUES = 4
_COMPARED = (bool, int, float, str, tuple, torch.device, torch.dtype)
_OF_MODULES = "destroy() releases the program, and the next call compiles a new one."
_OF_NUMBERS = (
    "A number that changes between calls is an input or a buffer of floating-point numbers. Or "
    "call inferenceModel or trainingModel once more: they copy the attributes of the model."
)


def warn_of_later_attributes(own: Mapping[str, Any], wrapped: nn.Module) -> None:
    """Warn of an attribute that forward reads and the user has set since the model was copied.

    Args:
        own: The attributes of that time.
        wrapped: The module that the user has.
    """
    for name, value in vars(wrapped).items():
        then = own.get(name)
        is_same = value is then or (type(value) in _COMPARED and value == then)
        if is_same or name in OF_MODULES:
            continue
        if former_values_of(wrapped).later_value_is_read(type(wrapped), name):
            logs.python.warning(
                "The attribute '%s' of the model was set after inferenceModel or trainingModel had "
                "copied its attributes: forward does not see that value. Set it before that call.",
                name,
            )
            return


class ModelWatch:
    """The modules of a model, with their modes, hooks and numbers, when it was compiled.

    Args:
        module: The model.
        wrapped: The module that the user has; the model may be a shallow copy, with attributes of
            its own.
        constants: The attributes with host tensors that forward has read.
    """

    def __init__(
        self, module: nn.Module, wrapped: nn.Module, constants: Sequence[Constant] = ()
    ) -> None:
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
        self._numbers = [
            _Numbers(path, vars(one), vars(wrapped if one is module else one), names)
            for path, one in paths.items()
            if (names := _numbers_of(one))
        ]
        own = {path: vars(wrapped if one is module else one) for path, one in paths.items()}
        present = [one for one in constants if one[1] in own.get(one[0], ())]
        self._constants = ConstantWatch(present, own) if present else None
        self._next = 0
        self._wait = _CALLS_PER_VALUES
        self._warned: set[str] = set()

    def check(self) -> None:
        """Warn once of other modes, hooks and modules, and of other values in attributes."""
        # The fast path of nearly all calls.
        self._wait -= 1
        if not self._wait:
            self._check_values()
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

    def _check_values(self) -> None:
        """Warn once of other host tensors and numbers in attributes; of those, of one module."""
        self._wait = _CALLS_PER_VALUES
        if self._constants is not None:
            self._constants.check()
        if not self._numbers:
            return
        numbers = self._numbers[self._next]
        self._next = self._next - 1 if self._next else len(self._numbers) - 1
        try:
            changed = numbers.read(numbers.own) != numbers.then
        except (KeyError, RuntimeError, TypeError, ValueError):
            changed = True  # (a tensor is there, for example)
        if changed is not False:
            self._warn("numbers", numbers.first_change)

    def _warn(self, kind: str, text: Callable[[], str | None]) -> None:
        if kind in self._warned:
            return
        found = text()
        if found is not None:
            self._warned.add(kind)
            logs.python.warning(
                "%s, but the compiled model runs as before: it was recorded when it was compiled. "
                "%s",
                *(found, _OF_NUMBERS if kind == "numbers" else _OF_MODULES),
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


class _Numbers:
    """The numbers and strings that forward of a module reads from attributes.

    Args:
        path: The path of the module.
        compiled: Its attributes, with the values that forward has read.
        own: Its attributes, where the user changes them.
        names: The names of those to look at.

    Attributes:
        own: Its attributes.
        read: Returns the values of all names, or the only one.
        then: The values that forward has read.
    """

    def __init__(
        self, path: str, compiled: Mapping[str, Any], own: Mapping[str, Any], names: Sequence[str]
    ) -> None:
        self._path = path
        self._names = names
        self.own = own
        self.read = itemgetter(*names)
        self.then = self.read(compiled)

    def first_change(self) -> str | None:
        """Return a text about one that is another one now."""
        values = self.then if len(self._names) > 1 else (self.then,)
        for name, then in zip(self._names, values, strict=True):
            of = f"The attribute '{name}' of {_place(self._path, begins=False)}"
            if name not in self.own:
                return f"{of} was deleted"
            now = self.own[name]
            if not isinstance(now, (int, float, str)):
                return f"{of} is a {type(now).__name__} now"
            if now is not then and now != then:
                return f"{of} is {now!r} now, and was {then!r}"
        return None


def _numbers_of(module: nn.Module) -> list[str]:
    code = getattr(type(module).forward, "__code__", None)
    return [
        name
        for name in getattr(code, "co_names", ())
        if name != "training" and type(vars(module).get(name)) in (int, float, bool, str)
    ]


def _copies(module: nn.Module) -> list[Mapping[int, Any]]:
    return [dict(hooks) for hooks in hooks_of(module)]


def _place(path: str, *, begins: bool = True) -> str:
    the = "The" if begins else "the"
    return f"{the} module '{path}'" if path else f"{the} model"
