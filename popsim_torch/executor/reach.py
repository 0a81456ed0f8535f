"""Finds what a user's function can use: modules, parameters, optimizers, queues, iterators.

The search follows the names of the function: closures, globals in its code, defaults, the object
of a method, containers, and attributes of plain objects. An object that this search does not find
appears during the trace of the function (``UnknownObject``), and is added then.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from popsim_torch.executor.base import HasModel
from popsim_torch.feeds import InfeedQueue, OutfeedQueue

_MAX_DEPTH = 8


@dataclass
class Reach:
    """The objects that were found, each one once.

    Attributes:
        modules: The modules, by the name that leads to them; no module is part of another.
        parameters: The parameters outside of all modules, by the name that leads to them.
        optimizers: The optimizers, in the order in which they were found.
        queues: The outfeed queues.
        infeeds: The infeed queues from which a body takes elements with ``next``.
        iterators: Iterators of the host: of data loaders, lists, generators and the like.
        met: All modules, also those without state and those inside of others.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    queues: list[OutfeedQueue] = field(default_factory=list)
    infeeds: list[InfeedQueue] = field(default_factory=list)
    iterators: list[Iterator[Any]] = field(default_factory=list)
    met: list[nn.Module] = field(default_factory=list)

    def add(self, found: object, name: str = "") -> None:
        """Add an object that appeared during the trace of the function."""
        if isinstance(found, nn.Module):
            self.met.append(found)
            _add_named(self.modules, name or type(found).__name__.lower(), found)
        elif isinstance(found, nn.Parameter):
            _add_named(self.parameters, name or "parameter", found)
        elif isinstance(found, torch.optim.Optimizer):
            if not any(known is found for known in self.optimizers):
                self.optimizers.append(found)
        elif isinstance(found, InfeedQueue):
            self.infeeds.append(found)
        elif isinstance(found, OutfeedQueue) and not any(known is found for known in self.queues):
            self.queues.append(found)
        elif isinstance(found, Iterator):
            self.iterators.append(found)

    @property
    def size(self) -> int:
        """The number of objects that a body can use."""
        kinds = (self.modules, self.parameters, self.optimizers, self.infeeds)
        return sum(len(known) for known in kinds)

    def tidy(self) -> None:
        """Drop modules without state or inside of others; add what only optimizers have."""
        for name, module in list(self.modules.items()):
            if not any(True for _ in (*module.parameters(), *module.buffers())):
                del self.modules[name]
                continue
            others = (other for other in self.modules.values() if other is not module)
            if any(module is part for other in others for part in other.modules()):
                del self.modules[name]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self.add(parameter)
        within = {id(p) for module in self.modules.values() for p in module.parameters()}
        for name, parameter in list(self.parameters.items()):
            if id(parameter) in within:
                del self.parameters[name]


def _add_named(known: dict[str, Any], name: str, value: object) -> None:
    if any(value is other for other in known.values()):
        return
    name = name.replace(".", "_") or "module"
    candidate, number = name, 1
    while candidate in known or hasattr(nn.Module, candidate):
        candidate, number = f"{name}_{number}", number + 1
    known[candidate] = value


def reach(starts: Iterable[object], steps_to_body: int = 0) -> Reach:
    """Return the objects that functions can use.

    Args:
        starts: Functions of the user, and other objects that are passed to them.
        steps_to_body: Number of further steps that the search takes: the body of a loop may be so
            many names away from a start.
    """
    found = Reach()
    seen: set[int] = set()
    kept: list[object] = []  # keeps the objects alive, so that no id is used twice
    for one in starts:
        _visit(one, "", found, seen, kept, -steps_to_body)
    # The attributes of a part of a model are searched, no matter how deep the part is.
    for module in list(found.modules.values()):
        for part in module.modules():
            for name, inner in _inside(part):
                _visit(inner, name, found, seen, kept, 1)
    found.tidy()
    return found


@contextmanager
def failures_told(module: nn.Module) -> Iterator[None]:
    """Notify the queues that a module can use if it cannot be compiled: their readers may wait."""
    try:
        yield
    except BaseException as error:
        for queue in reach([module.forward]).queues:
            queue._begin_run()
            queue._end_run(error)
        raise


def _visit(
    value: Any, name: str, found: Reach, seen: set[int], kept: list[object], depth: int
) -> None:
    if id(value) in seen or depth > _MAX_DEPTH or _is_gone(value):
        return
    seen.add(id(value))
    kept.append(value)
    if isinstance(value, HasModel):
        value = value._user_model
    if isinstance(value, InfeedQueue):
        return  # the source of an iterator belongs to the iterator
    kinds = (nn.Parameter, torch.optim.Optimizer, OutfeedQueue, nn.Module, Iterator)
    if isinstance(value, kinds):
        found.add(value, name)
    for inner_name, inner in _inside(value):
        _visit(inner, inner_name, found, seen, kept, depth + 1)


def _is_gone(value: Any) -> bool:
    """Return whether a value is a proxy of an object that no longer exists."""
    if type(value) not in weakref.ProxyTypes:
        return False
    try:
        return value.__class__ is None
    except ReferenceError:
        return True


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that an object refers to, each with a name."""
    if isinstance(value, functools.partial):
        yield "", value.func
        yield from (("", item) for item in value.args)
        yield from value.keywords.items()
    elif isinstance(value, types.MethodType):
        yield "", value.__self__
        yield "", value.__func__
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from (("", item) for item in value)
    elif isinstance(value, type):
        # Other attributes of a class appear during the trace of the function.
        yield from ((name, one) for name, one in vars(value).items() if isinstance(one, Iterator))
    elif _is_plain_object(value):
        yield from vars(value).items()
        yield "", type(value)


def _is_plain_object(value: Any) -> bool:
    if isinstance(value, (type, types.ModuleType, torch.Tensor, torch.utils.data.Dataset)):
        return False
    if isinstance(value, nn.Module):
        return True  # its attributes may hold an optimizer or a queue
    package = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and package not in {"torch", "numpy", "threading", "builtins"}


def _of_function(value: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # the cell is still empty
            continue
    yield from (("", item) for item in value.__defaults__ or ())
    yield from (value.__kwdefaults__ or {}).items()
    if hasattr(value, "__wrapped__"):
        yield "", value.__wrapped__
    if (value.__module__ or "").partition(".")[0] in {"torch", "popsim_torch"}:
        return
    mentioned = list(_mentioned(value.__code__))
    for name in mentioned:
        found = value.__globals__.get(name)
        yield name, found
        if isinstance(found, types.ModuleType):
            inside = ((one, vars(found).get(one)) for one in mentioned)
            yield from ((one, it) for one, it in inside if isinstance(it, Iterator))


def _mentioned(code: types.CodeType) -> Iterator[str]:
    """Yield the names that appear in code and in the functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _mentioned(constant)
