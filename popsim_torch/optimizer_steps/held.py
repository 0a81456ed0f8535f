"""What Python holds beside the numbers and tensors of an optimizer: a step must not change it."""

from __future__ import annotations

import io
import operator
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from popsim_torch.errors import Error
from popsim_torch.optim.nested import Path, number_kind, path_name
from popsim_torch.optimizer_steps.noting import NotingDict
from popsim_torch.private_torch.modes import DisableTorchFunction
from popsim_torch.trace.graph.traced_tensors import host_computation

__all__ = [
    "Held",
    "HeldByCode",
    "is_same",
    "is_same_content",
    "is_simple",
    "refuse_change",
    "refuse_objects",
]

_SIMPLE = (bool, int, float, complex, str, bytes, type(None))
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "popsim_torch", "__builtin__"})
_OF_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType)
_OF_TORCH = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
_MOST_ENTRIES = 100  # of a global container: larger ones are data
_MOST_HELD = 10000
_ADVICE = (
    "A step runs on the device, which keeps numbers, truth values and tensors from one step to the "
    "next. Keep a number or truth value in self.state[parameter], in the group, or as an attribute "
    "of the optimizer that is a plain number; tensors in self.state[parameter]."
)


def is_simple(value: object) -> bool:
    """Return whether a value is a number, a text or nothing: it cannot change itself."""
    # (numbers of a trace pose as Python's, and are none)
    return issubclass(type(value), _SIMPLE) or _is_numpy_number(value)


def is_same(a: Any, b: Any) -> bool:
    """Return whether two values are the same object, or equal and simple, or empty containers."""
    if a is b:
        return True
    if isinstance(a, (list, dict, tuple)) and type(a) is type(b):
        return not a and not b
    return type(a) is type(b) and is_simple(a) and bool(a == b or (a != a and b != b))


def is_same_content(old: Any, new: Any) -> bool:
    """Return whether a container that takes the place of another one holds the same.

    What a step has not read in a dict leaves nothing to it.
    """
    if isinstance(old, NotingDict) and not old.read:
        return True
    before, now = _entries(old) or {}, _entries(new) or {}
    return before.keys() == now.keys() and all(is_same(one, now[k]) for k, one in before.items())


def _is_numpy_number(value: object) -> bool:
    kind = type(value)
    return kind.__module__ == "numpy" and any(one.__name__ == "generic" for one in kind.__mro__)


def _is_own(value: object) -> bool:
    """Return whether a value is an object of a class of the user's."""
    if not hasattr(value, "__dict__") or isinstance(value, _OF_CODE + _OF_TORCH):
        return False
    return type(value).__module__.split(".")[0] not in _LIBRARIES


def _entries(value: Any) -> dict[Any, Any] | None:
    """Return what an object holds; None if that is unknown."""
    if isinstance(value, dict):
        return dict(dict.items(value))
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    if isinstance(value, (set, frozenset)):
        return dict.fromkeys(value)
    if isinstance(value, random.Random):
        return {"state": str(value.getstate())}
    if _is_small_tensor(value):
        with host_computation(), torch.no_grad():
            return {"values": str(value.tolist())}
    if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
        return {"next value": f"{value!r} {operator.length_hint(value, -1)}"}
    return dict(vars(value)) if _is_own(value) else None


def _is_small_tensor(value: object) -> bool:
    """Return whether a value is a tensor with values, of few elements."""
    with DisableTorchFunction():
        return type(value) is torch.Tensor and value.numel() <= _MOST_ENTRIES


def _state_of(value: Any) -> Any:
    """Return what puts an object back that does not show what it holds."""
    if isinstance(value, random.Random):
        return value.getstate()
    if not _is_small_tensor(value):
        return None
    with host_computation(), torch.no_grad():
        return value.detach().clone()


def _restore(value: Any, entries: Mapping[Any, Any], state: Any) -> None:
    if isinstance(value, dict):
        dict.clear(value)
        dict.update(value, entries)
    elif isinstance(value, list):
        value[:] = entries.values()
    elif isinstance(value, deque):
        value.clear()
        value.extend(entries.values())
    elif isinstance(value, set):
        value.clear()
        value.update(entries)
    elif isinstance(value, random.Random):
        value.setstate(state)
    elif isinstance(value, torch.Tensor):
        with host_computation(), torch.no_grad():
            value.copy_(state)
    elif not isinstance(value, (tuple, frozenset, Iterator)):
        vars(value).clear()
        vars(value).update(entries)


class _Part:
    """An object with what it holds."""

    def __init__(self, name: str, value: Any, entries: dict[Any, Any]) -> None:
        self.name, self.value, self.entries = name, value, entries
        self._state = _state_of(value)

    def change(self) -> str:
        """Return the name of something that has changed; nothing if nothing has.

        Entries that are added to a dict are a memory of results, if they stay as they are (numbers
        only where that is known); those that a step sets before it reads them leave nothing to the
        next one.
        """
        now = _entries(self.value) or {}
        read = self.value.read if isinstance(self.value, NotingDict) else None
        for key, old in self.entries.items():
            if key in now and is_same(old, now[key]):
                continue
            if read is None or key in read:
                return self.entry_name(key)
        added = [key for key in now if key not in self.entries]
        if isinstance(self.value, dict):
            added = [
                key
                for key in added
                if (
                    number_kind(now[key])
                    if read is None
                    else key in read and not is_simple(now[key])
                )
            ]
        return self.entry_name(added[0]) if added else ""

    def entry_name(self, key: Any) -> str:
        """Return the name of an entry."""
        if isinstance(self.value, (set, frozenset, random.Random, Iterator, torch.Tensor)):
            return self.name
        if isinstance(self.value, (dict, list, tuple, deque)):
            return f"{self.name}[{key!r}]"
        return f"{self.name}.{key}"

    def restore(self) -> None:
        """Put back what the object held."""
        now = _entries(self.value) or {}
        same = list(now) == list(self.entries)
        if not same or any(now[key] is not old for key, old in self.entries.items()):
            _restore(self.value, self.entries, self._state)


class Held:
    """What objects hold at one time, and everything in them.

    Args:
        roots: The objects, by name.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._parts: list[_Part] = []
        self._seen: set[int] = set()
        for name, value in roots.items():
            self._add(name, value)

    def _add(self, name: str, value: Any) -> None:
        entries = None if id(value) in self._seen else _entries(value)
        if entries is None or len(entries) > _MOST_HELD:
            return
        self._seen.add(id(value))
        part = _Part(name, value, entries)
        self._parts.append(part)
        for key, item in entries.items():
            self._add(part.entry_name(key), item)

    def change(self) -> str:
        """Return the name of something that has changed; nothing if nothing has."""
        return next((name for part in self._parts if (name := part.change())), "")

    def restore(self) -> None:
        """Put back what the objects held."""
        for part in self._parts:
            part.restore()


class HeldByCode:
    """The values of the classes and modules that have the code of a step.

    Args:
        kind: The class of the optimizer.
        namespaces: The global names of its code.
    """

    def __init__(self, kind: type[Any], namespaces: list[dict[str, Any]]) -> None:
        classes = [one for one in kind.__mro__ if one.__module__.split(".")[0] not in _LIBRARIES]
        self._names: list[tuple[str, Any, dict[str, Any]]] = [
            (f"{one.__name__}.", one, _values(vars(one))) for one in classes
        ]
        self._names += [
            ("the global name ", one, _values(one))
            for one in namespaces
            if str(one.get("__name__", "")).split(".")[0] not in _LIBRARIES
        ]
        self._held = Held(
            {f"{prefix}{key}": v for prefix, _, values in self._names for key, v in values.items()}
        )
        self._random = random.getstate()

    def change(self) -> str:
        """Return the name of something that has changed; nothing if nothing has."""
        for prefix, owner, values in self._names:
            now = owner if isinstance(owner, dict) else vars(owner)
            for key, value in values.items():
                if key not in now or not is_same(value, now[key]):
                    return f"{prefix}{key}"
        if random.getstate() != self._random:
            return "the state of Python's random (draw numbers with torch.rand)"
        return self._held.change()

    def restore(self) -> None:
        """Put back what they held."""
        for _, owner, values in self._names:
            now = owner if isinstance(owner, dict) else vars(owner)
            for key, value in values.items():
                if key not in now or now[key] is not value:
                    if isinstance(owner, dict):
                        owner[key] = value
                    else:
                        setattr(owner, key, value)
        self._held.restore()
        if random.getstate() != self._random:
            random.setstate(self._random)


def _values(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the simple values among some names, and the small containers of such."""
    found = {}
    for name, value in list(names.items()):
        if name.startswith("__"):
            continue
        entries = _entries(value) if isinstance(value, (dict, list, set, deque)) else None
        if is_simple(value) or (
            entries is not None
            and len(entries) <= _MOST_ENTRIES
            and all(map(is_simple, entries.values()))
        ):
            found[name] = value
    return found


def refuse_change(kind: type[Any], name: str) -> None:
    """Refuse a step that changes something of Python's, if there is something.

    Raises:
        Error: The name is not empty.
    """
    if name:
        raise Error(f"The step of {kind.__name__} changes {name}. {_ADVICE}")


def refuse_objects(kind: type[Any], path: Path, value: Any) -> None:
    """Refuse an object in a state that holds tensors, or numbers of the device.

    Raises:
        Error: It holds some.
    """
    todo, seen = [value], set()
    while todo:
        one = todo.pop()
        if isinstance(one, (torch.Tensor, torch.SymFloat, torch.SymBool)):
            raise Error(
                f"The step of {kind.__name__} keeps an object of class {type(value).__name__} as "
                f"'{path_name(path)}' in the state of a parameter, and tensors in there. The "
                "device finds tensors in numbers, lists, tuples and dicts of the state only: keep "
                "the tensors themselves in self.state[parameter]; for the last n of them, one "
                "tensor with n rows and a count."
            )
        if id(one) not in seen:
            seen.add(id(one))
            todo += (_entries(one) or {}).values()
