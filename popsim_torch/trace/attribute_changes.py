"""Warns of attributes that forward changes: they end with the trace."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from popsim_torch import logs
from popsim_torch.private_torch.trees import tree_leaves
from popsim_torch.trace.former_values import FormerValues, Kind
from popsim_torch.trace.graph.traced_tensors import has_memory, host_computation
from popsim_torch.trace.kept_objects import OF_MODULES, fakes_in, holds_fakes

__all__ = ["Place", "UsedTensors", "warn_of_changes"]

_BUFFER = "Make it a buffer (register_buffer), and change it in place (copy_, add_)."
_STRING = "Give it the value before the model is compiled."
_NUMBER = "A buffer of floating-point numbers, changed in place, counts on the device."


class UsedTensors(Protocol):
    """Knows which tensors of the host forward has used."""

    def was_used(self, host: torch.Tensor) -> bool:
        """Return whether forward has used a host tensor."""

    def is_copy(self, traced: torch.Tensor, host: torch.Tensor) -> bool:
        """Return whether a traced tensor is the unchanged data of a host tensor."""

    def differs_in_runs(self, traced: torch.Tensor) -> bool:
        """Return whether a traced tensor depends on inputs, or on state that changes."""


@dataclass(frozen=True)
class Place:
    """A module, or an object of the user's in its attributes, or a class or file, before forward.

    Attributes:
        owner: The module or object, the class of modules, or the file with global names.
        module: The module whose forward is told of: this one, or the one that has the object.
        before: The value of each attribute, and a copy of it: a list or dict with the same leaves,
            or an array.
    """

    owner: Any
    module: nn.Module
    before: Mapping[str, tuple[Any, Any]]

    @property
    def kind(self) -> Kind:
        """The file or class, or the class of the module or object."""
        return self.owner if isinstance(self.owner, (ModuleType, type)) else type(self.owner)

    def now(self) -> Iterator[tuple[str, Any]]:
        """Yield the names that may have changed, and their values."""
        for name, value in list(vars(self.owner).items()):
            if isinstance(self.owner, nn.Module):
                is_left_out = name in OF_MODULES
            else:
                is_left_out = (
                    isinstance(self.owner, (ModuleType, type))
                    and name not in self.before
                    and not isinstance(value, torch.Tensor)
                )
            if not is_left_out:
                yield name, value


def warn_of_changes(places: Sequence[Place], used: UsedTensors) -> None:
    """Warn of attributes with which the next call of forward would compute something else.

    Args:
        places: The places of attributes before forward.
        used: Knows whether forward has used a former value, which it has replaced by another.
    """
    changes = _Changes(places, used)
    texts = [
        f"forward of {type(place.module).__name__} {text}"
        for place in places
        for name, value in place.now()
        if (text := changes.text(place, name, value)) is not None
    ]
    for text in dict.fromkeys(texts):  # layers of one class have the same
        logs.python.warning(text)


class _Changes:
    def __init__(self, places: Sequence[Place], used: UsedTensors) -> None:
        self._places = places
        self._used = used
        self._known = {id(place.owner) for place in places}

    @functools.cached_property
    def _former_values(self) -> FormerValues:
        return FormerValues({place.kind: None for place in self._places})

    def text(self, place: Place, name: str, now: Any) -> str | None:
        """Return the text about an attribute whose change matters; None for others."""
        if isinstance(place.owner, ModuleType):
            which = f"the global name '{name}'"
        elif isinstance(place.owner, type):
            which = f"the attribute '{name}' of the class {place.owner.__name__}"
        elif place.owner is place.module:
            which = f"the attribute '{name}'"
        else:
            which = f"the attribute '{name}' of its {type(place.owner).__name__}"
        then, content = place.before.get(name, (None, None))
        if isinstance(then, (int, float)) and isinstance(now, (int, float)):
            if _is_same(then, now) or not self._former_values.are_read(place.kind, name):
                return None
            return _text(f"changes {which} from {then} to {now}", _NUMBER)
        if isinstance(then, str) and isinstance(now, str):
            if now == then or not self._former_values.are_read(place.kind, name):
                return None
            return _text(f"changes {which} from {then!r} to {now!r}", _STRING)
        if isinstance(content, np.ndarray):
            if np.array_equal(content, now, equal_nan=True) or not self._former_values.are_read(
                place.kind, name
            ):
                return None
            return _text(f"changes the array in {which}", _NUMBER)
        if now is then and _differ_in_numbers(content, now):
            if not self._former_values.entries_are_read(place.kind, name):
                return None
            return _text(f"changes numbers in {which}", _NUMBER)
        if isinstance(then, torch.Tensor):
            matters = now is not then and self._replaces(then, now)
        elif not self._differs(now):
            matters = False
        elif now is then:
            new_keys = isinstance(now, dict) and not any(
                self._differs(one) for key, one in dict.items(now) if key in content
            )
            if not self._former_values.entries_are_read(place.kind, name, new_keys=new_keys):
                return None
            return _text(f"puts tensors into {which}", _BUFFER)
        else:
            matters = self._former_values.are_read(place.kind, name)
        return _text(f"assigns a tensor to {which}", _BUFFER) if matters else None

    def _replaces(self, then: torch.Tensor, now: Any) -> bool:
        """Return whether a tensor matters to forward, which has replaced it by another value."""
        is_tensor = isinstance(now, torch.Tensor)
        if is_tensor and now.shape != then.shape and not self._differs(now):
            return False  # a table that forward has made larger
        if holds_fakes(now):
            if self._used.is_copy(now, then):  # self.table = self.table.to(x.device)
                return False
            # (otherwise forward computes it anew each time, like the weight of weight_norm)
            return self._used.was_used(then) or _is_kept(then, self._places)
        return is_tensor and self._used.was_used(then) and _differ(then, now)

    def _differs(self, value: Any) -> bool:
        return any(map(self._used.differs_in_runs, fakes_in(value, self._known)))


def _text(what: str, todo: str) -> str:
    return (
        f"{what}. It runs once, when the model is compiled: all runs of the program begin with the "
        f"former value. {todo}"
    )


def _differ_in_numbers(content: Any, now: Any) -> bool:
    """Return whether entries of lists or dicts, which were numbers, are other numbers now."""
    if isinstance(content, dict) and isinstance(now, dict):
        return any(_differ_in_numbers(one, now.get(key)) for key, one in content.items())
    if isinstance(content, list) and isinstance(now, (list, deque)):
        return any(map(_differ_in_numbers, content, now))
    numbers = (int, float)
    return isinstance(content, numbers) and isinstance(now, numbers) and not _is_same(content, now)


def _is_same(then: float, now: float) -> bool:
    return now == then or (then != then and now != now)  # (both are no numbers)


def _is_kept(tensor: torch.Tensor, places: Sequence[Place]) -> bool:
    """Return whether an attribute of a module, or of an object in it, has a tensor."""
    attributes = (value for place in places for value in vars(place.owner).values())
    return any(leaf is tensor for value in attributes for leaf in tree_leaves(value))


def _differ(then: torch.Tensor, now: torch.Tensor) -> bool:
    """Return whether host tensors have other values; of another dtype they are converted ones."""
    if then.dtype != now.dtype or not (has_memory(then) and has_memory(now)):
        return False
    with host_computation():
        return not torch.equal(then, now)
