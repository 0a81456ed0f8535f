"""Finds the objects of the user's classes in which forward may keep state."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator, Mapping
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from popsim_torch.private_torch.fake import FakeTensor
from popsim_torch.trace.contents import MOST, items_in
from popsim_torch.trace.former_values import methods_of
from popsim_torch.trace.host_reads import LIBRARIES

__all__ = [
    "OF_MODULES",
    "class_state",
    "fakes_in",
    "global_state",
    "holds_fakes",
    "kept_objects",
    "tensors_kept",
]

OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes of all modules."""
_NO_FAKES = frozenset({type(None), bool, int, float, str, torch.Tensor, nn.Parameter})
_PLAIN = _NO_FAKES | {FakeTensor}
_STATES = frozenset(
    {type(None), bool, int, float, str, torch.Tensor, dict, list, deque, np.ndarray}
)
_CONTAINERS = frozenset({dict, list, tuple, deque, set, OrderedDict})


def kept_objects(module: nn.Module) -> Iterator[tuple[Any, nn.Module]]:
    """Yield the objects in attributes of modules, or of other objects, and the first module.

    Args:
        module: The model.
    """
    seen = set[int]()
    for child in module.modules():
        for name, value in vars(child).items():
            if type(value) not in _PLAIN and name not in OF_MODULES:
                yield from ((one, child) for one in _objects(value, seen))


def global_state(module: nn.Module) -> Iterator[tuple[ModuleType, dict[str, Any]]]:
    """Yield the files with a model's classes, and their globals in which forward may keep state.

    Args:
        module: The model.
    """
    kinds = dict.fromkeys(map(type, module.modules()))
    for name in dict.fromkeys(kind.__module__ for kind in kinds):
        file = sys.modules.get(name)
        if isinstance(file, ModuleType) and name.partition(".")[0] not in LIBRARIES:
            used = _used_names(vars(file), [kind for kind in kinds if kind.__module__ == name])
            found = {key: vars(file)[key] for key in used if key in vars(file)}
            yield file, {key: one for key, one in found.items() if _may_be_state(one)}


def class_state(module: nn.Module) -> Iterator[tuple[type, nn.Module, dict[str, Any]]]:
    """Yield a model's classes, a module of each, and attributes in which forward may keep state.

    Args:
        module: The model.
    """
    found = {kind: one for one in module.modules() for kind in type(one).__mro__}
    for kind, one in found.items():
        if kind.__module__.partition(".")[0] not in LIBRARIES:
            names = vars(kind).items()
            yield kind, one, {name: value for name, value in names if _may_be_state(value)}


def _may_be_state(value: Any) -> bool:
    return type(value) in _STATES and not (type(value) in _CONTAINERS and len(value) > MOST)


def _used_names(names: Mapping[str, Any], kinds: Iterable[type]) -> set[str]:
    """Return the names in the methods of classes, and in the functions of a file that they call."""
    todo = [code for kind in kinds for codes in methods_of(kind).values() for code in codes]
    used = set[str]()
    while todo:
        new = set(todo.pop().co_names) - used
        used |= new
        functions = (names.get(name) for name in new)
        todo += [one.__code__ for one in functions if isinstance(one, FunctionType)]
    return used


def holds_fakes(value: Any, known: Container[int] = ()) -> bool:
    """Return whether ``fakes_in`` yields something."""
    if type(value) in _NO_FAKES or (type(value) in _CONTAINERS and not value):
        return False  # most attributes of a module
    return next(fakes_in(value, known), None) is not None


def fakes_in(value: Any, known: Container[int] = ()) -> Iterator[FakeTensor]:
    """Yield the traced tensors in a value, in lists and dicts in it, and in objects.

    Args:
        value: The value.
        known: The ids of objects whose attributes are left out.
    """
    return (one for one in tensors_kept(value, known) if isinstance(one, FakeTensor))


def tensors_kept(value: Any, known: Container[int] = ()) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, in lists and dicts in it, and in objects.

    Args:
        value: The value.
        known: The ids of objects whose attributes are left out.
    """
    seen = set[int]()
    todo = [value]
    while todo:
        value = todo.pop()
        kind = type(value)  # (isinstance() fails for a proxy of an object that is gone)
        if issubclass(kind, torch.Tensor):
            yield value
        elif kind not in _PLAIN and id(value) not in seen:
            seen.add(id(value))
            todo += _inner(value, attributes=id(value) not in known)


def _objects(value: Any, seen: set[int]) -> Iterator[Any]:
    todo = [value]
    while todo:
        value = todo.pop()
        if type(value) in _PLAIN or id(value) in seen:
            continue
        seen.add(id(value))
        if _attributes(value) is not None:
            yield value
        inner = _inner(value)
        todo += inner if len(inner) <= MOST else []


def _inner(value: Any, *, attributes: bool = True) -> list[Any]:
    """Return what is in a list, tuple, dict, set or object of the user's."""
    inner = items_in(value)
    if attributes and type(value) not in _CONTAINERS:
        inner += (_attributes(value) or {}).values()
    return inner


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object of the user's; None for other values."""
    if not _is_of_user(type(value)):
        return None
    try:
        found: dict[str, Any] = vars(value)
    except Exception:  # (none, or the user's code computes them)
        return None
    return found


def _is_of_user(kind: type) -> bool:
    """Return whether forward may keep state in objects of a class, which is no module."""
    if issubclass(kind, (nn.Module, torch.Tensor, type)):
        return False
    return kind is SimpleNamespace or str(kind.__module__).partition(".")[0] not in LIBRARIES
