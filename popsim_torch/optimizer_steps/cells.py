"""The places where an optimizer keeps what a step leaves to the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from popsim_torch.errors import Error
from popsim_torch.optim.nested import Path, is_number, is_truth, leaves, mapped
from popsim_torch.optimizer_steps.numbers import StepNumber, truth_as_number
from popsim_torch.private_torch.modes import DisableTorchFunction

__all__ = ["States"]


class _Entries(dict[Any, Any]):
    """A dict whose entries are all set by ``__setitem__``."""

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return an entry; add it if it is missing."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *others: Any, **entries: Any) -> None:
        """Set several entries."""
        for key, value in dict(*others, **entries).items():
            self[key] = value


class _State(_Entries):
    """The state of one parameter; notes the value with which each entry begins."""

    def __init__(self, number_of: Callable[[float], StepNumber]) -> None:
        super().__init__()
        self._number_of = number_of
        self.initial: dict[Path, torch.Tensor] = {}
        self.whole: set[Path] = set()

    def __setitem__(self, key: Any, value: Any) -> None:
        known = key in self
        self.whole |= {path for path, leaf in leaves(value, (key,)) if type(leaf) is int}
        value = self._with_numbers(value)
        if not known:
            for path, leaf in leaves(value, (key,)):
                if isinstance(leaf, StepNumber):
                    self.initial[path] = leaf.tensor
                elif is_truth(leaf):
                    self.initial[path] = truth_as_number(leaf)
                elif isinstance(leaf, torch.Tensor):
                    with DisableTorchFunction():
                        self.initial[path] = leaf.clone()
        super().__setitem__(key, value)

    def _with_numbers(self, value: Any) -> Any:
        """Return a value with numbers of the device; lists and dicts stay the same objects."""
        if isinstance(value, dict):
            items = [(_plain_key(key), self._with_numbers(item)) for key, item in value.items()]
            value.clear()
            value.update(items)
        elif isinstance(value, list):
            value[:] = map(self._with_numbers, value)
        elif isinstance(value, tuple):
            return mapped(value, lambda _, leaf: self._with_numbers(leaf))
        elif _is_plain(value):
            return self._number_of(value)
        return value


def _plain_key(key: Any) -> Any:
    """Return the key of a dict; a hyper-parameter there is its present value."""
    return float(key) if isinstance(key, StepNumber) else key


def _is_plain(value: object) -> bool:
    return is_number(value) and not isinstance(value, StepNumber)


class States(_Entries):
    """The states of an optimizer: of each parameter, and others."""

    def __init__(self, number_of: Callable[[float], StepNumber]) -> None:
        super().__init__()
        self._number_of = number_of

    def __missing__(self, key: Any) -> _State:
        self[key] = _State(self._number_of)
        found: _State = self[key]
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, torch.Tensor) and not isinstance(value, _State):
            state = self[key]
            state.clear()
            state.update(value)
            return
        if not isinstance(key, torch.Tensor) and not isinstance(value, _State):
            if not isinstance(value, Mapping):
                raise Error(
                    f"The optimizer keeps '{key}' in its state beside the states of parameters, as "
                    f"a {type(value).__name__}; it must be a dict, or an attribute."
                )
            found = _State(self._number_of)
            found.update(value)
            value = found
        super().__setitem__(key, value)
