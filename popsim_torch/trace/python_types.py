"""Lets ``type(x)`` of a tensor of the device be ``torch.Tensor`` in the user's code.

Traced tensors are of a class of PyTorch's own. ``isinstance`` does not show that, but
``type(x) is torch.Tensor`` and a table of functions by ``type(x)`` would take another way than in
eager PyTorch. While a model is traced, the files of the user's code have another ``type``: all of
them outside of Python's libraries, and in libraries those that the model is seen to use.
"""

from __future__ import annotations

import builtins
import functools
import os
import site
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from popsim_torch.private_torch.fake import FakeTensor
from popsim_torch.trace.graph.origin import is_user_path
from popsim_torch.trace.selected import Selected

__all__ = ["types_of_tensors"]


class _Types(type):
    """The class of what stands for ``type``."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        kind = builtins.type(*args, **kwargs)
        if kind is builtins.type:
            return cls
        if kind not in (FakeTensor, Selected) or len(args) != 1:
            return kind
        return nn.Parameter if isinstance(args[0], nn.Parameter) else torch.Tensor

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, builtins.type)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, builtins.type)

    def __eq__(cls, other: object) -> bool:
        return cls is other or other is builtins.type

    def __hash__(cls) -> int:
        return hash(builtins.type)

    def __getitem__(cls, item: Any) -> Any:
        return builtins.type[item]

    def __getattribute__(cls, name: str) -> Any:  # (of metaclasses: type.__call__(cls))
        return getattr(builtins.type, name)


class _Type(metaclass=_Types):
    """Stands for ``type``."""


_NOT_OF_USERS = {"builtins", "popsim_torch", "torch"}
_users: Counter[int] = Counter()  # traces that use a namespace, by its id


_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


# (a thread of the parent may hold it, which does not exist in a child)
os.register_at_fork(after_in_child=_renew_lock)


@contextmanager
def types_of_tensors(module: nn.Module) -> Iterator[None]:
    """Let ``type`` know tensors of the device while the context lasts.

    Args:
        module: The model.
    """
    namespaces = _namespaces(module)
    with _lock:
        for names in namespaces:
            if not _users[id(names)]:
                names["type"] = _Type
            _users[id(names)] += 1
    try:
        yield
    finally:
        with _lock:
            for names in namespaces:
                _users[id(names)] -= 1
                if not _users[id(names)]:
                    del _users[id(names)]
                    names.pop("type", None)


def _namespaces(module: nn.Module) -> list[dict[str, Any]]:
    """Return the global names of the files that may have code of a model."""
    kinds = {kind for one in module.modules() for kind in type(one).__mro__}
    found = _reached(module, kinds)
    packages = {kind.__module__.partition(".")[0] for kind in kinds} - _NOT_OF_USERS
    for name, one in list(sys.modules.items()):
        if isinstance(one, ModuleType) and (
            _is_file_of_user(vars(one).get("__file__"))
            or name.partition(".")[0] in packages
            or name == "__main__"
        ):
            found[id(vars(one))] = vars(one)
    # (the user may have another meaning for it)
    return [names for names in found.values() if names.get("type", _Type) is _Type]


@functools.cache
def _is_file_of_user(path: object) -> bool:
    """Return whether a file belongs neither to Python nor to an installed package."""
    return isinstance(path, str) and is_user_path(path) and not path.startswith(_libraries())


@functools.cache
def _libraries() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = [paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    found += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple(os.path.join(path, "") for path in found)


def _reached(module: nn.Module, kinds: Collection[type]) -> dict[int, dict[str, Any]]:
    """Return the global names of functions that a model's classes use by name."""
    found: dict[int, dict[str, Any]] = {}
    functions = [one for kind in kinds for one in _functions(vars(kind))]
    functions += [one for layer in module.modules() for one in _functions(vars(layer))]
    seen = set(functions)
    while functions:
        function = functions.pop()
        names = function.__globals__
        found[id(names)] = names
        called = _functions({name: names.get(name) for name in function.__code__.co_names})
        functions += [one for one in called if one not in seen]
        seen.update(called)
    return found


def _functions(named: Mapping[str, Any]) -> list[FunctionType]:
    """Return the functions of the user's among the members of a class, or other named values."""
    found = []
    for value in named.values():
        # (isinstance() fails for a proxy of an object that is gone)
        function: Any = value.fget if issubclass(type(value), property) else value
        if issubclass(type(function), (staticmethod, classmethod)):
            function = function.__func__
        while type(function) is FunctionType:
            if is_user_path(function.__code__.co_filename):
                found.append(function)
            function = vars(function).get("__wrapped__")
    return found
