"""Warns of attributes that forward changes: they end with the trace."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from popsim_torch import logs
from popsim_torch.trace.contents import Content, are_other_numbers
from popsim_torch.trace.former_values import FormerValues, Kind
from popsim_torch.trace.graph.traced_tensors import has_memory, host_computation
from popsim_torch.trace.kept_objects import OF_MODULES, fakes_in, holds_fakes, tensors_kept

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
        before: The value of each attribute, and what was in it: a ``Content``, or a copied array.
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
                    and not issubclass(type(value), torch.Tensor)
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

    @functools.cached_property
    def _kept(self) -> set[int]:
        """The ids of the tensors that modules, and objects in them, have now."""
        owned = (vars(place.owner) for place in self._places)
        return {id(one) for attributes in owned for one in tensors_kept(attributes, self._known)}

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
        if are_other_numbers(then, now):
            if not self._former_values.are_read(place.kind, name, anywhere=True):
                return None
            return _text(f"changes {which} from {then} to {now}", _NUMBER)
        if issubclass(type(then), str) and issubclass(type(now), str):
            if now == then or not self._former_values.are_read(place.kind, name):
                return None
            return _text(f"changes {which} from {then!r} to {now!r}", _STRING)
        if isinstance(content, np.ndarray):
            if _is_same_array(content, now) or not self._former_values.are_read(place.kind, name):
                return None
            return _text(f"changes the array in {which}", _NUMBER)
        if now is then and isinstance(content, Content) and content.has_other_numbers():
            if not self._former_values.entries_are_read(place.kind, name):
                return None
            return _text(f"changes numbers in {which}", _NUMBER)
        if issubclass(type(then), torch.Tensor):
            matters = now is not then and self._replaces(then, now)
        elif not self._differs(now):
            matters = False
        elif now is then:
            new_keys = (
                issubclass(type(now), dict)
                and isinstance(content, Content)
                and not any(self._differs(one) for key, one in dict.items(now) if content.had(key))
            )
            if not self._former_values.entries_are_read(place.kind, name, new_keys=new_keys):
                return None
            return _text(f"puts tensors into {which}", _BUFFER)
        else:
            matters = self._former_values.are_read(place.kind, name)
        return _text(f"assigns a tensor to {which}", _BUFFER) if matters else None

    def _replaces(self, then: torch.Tensor, now: Any) -> bool:
        """Return whether a tensor matters to forward, which has replaced it by another value."""
        is_tensor = issubclass(type(now), torch.Tensor)
        if is_tensor and now.shape != then.shape and not self._differs(now):
            return False  # a table that forward has made larger
        if holds_fakes(now):
            if self._used.is_copy(now, then):  # self.table = self.table.to(x.device)
                return False
            # (otherwise forward computes it anew each time, like the weight of weight_norm)
            return self._used.was_used(then) or id(then) in self._kept
        return is_tensor and self._used.was_used(then) and _differ(then, now)

    def _differs(self, value: Any) -> bool:
        return any(map(self._used.differs_in_runs, fakes_in(value, self._known)))


def _text(what: str, todo: str) -> str:
    return (
        f"{what}. It runs once, when the model is compiled: all runs of the program begin with the "
        f"former value. {todo}"
    )


def _is_same_array(then: np.ndarray[Any, Any], now: Any) -> bool:
    is_numeric = issubclass(type(now), np.ndarray) and now.dtype.kind in "biufc"
    return is_numeric and np.array_equal(then, now, equal_nan=True)


def _differ(then: torch.Tensor, now: torch.Tensor) -> bool:
    """Return whether host tensors have other values; of another dtype they are converted ones."""
    if then.dtype != now.dtype or not (has_memory(then) and has_memory(now)):
        return False
    with host_computation():
        return not torch.equal(then, now)
