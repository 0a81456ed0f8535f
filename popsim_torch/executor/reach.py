"""What a function of the user's code can use: modules, parameters, optimizers, queues, iterators.

Looked for where its names lead: closures, globals that its code mentions, defaults, the object of a
method, containers and attributes of plain objects. What is found in no such place turns up while
the function is traced (``UnknownObject``), and is added then.
"""

from __future__ import annotations

import functools
import types
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
    """What was found, each object once.

    Attributes:
        modules: By the name that leads to them; none is part of another.
        parameters: The same, of those outside of all modules.
        optimizers: In the order in which they were found.
        queues: The outfeed queues.
        infeeds: Infeed queues that a body takes elements of by ``next``.
        iterators: The host's own: of data loaders, lists, generators and the like.
        met: All modules, those without state and those within others included.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    queues: list[OutfeedQueue] = field(default_factory=list)
    infeeds: list[InfeedQueue] = field(default_factory=list)
    iterators: list[Iterator[Any]] = field(default_factory=list)
    met: list[nn.Module] = field(default_factory=list)

    def add(self, found: object, name: str = "") -> None:
        """Add an object that turned up while the function was traced."""
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
        """How many objects there are that a body can use."""
        kinds = (self.modules, self.parameters, self.optimizers, self.infeeds)
        return sum(len(known) for known in kinds)

    def tidy(self) -> None:
        """Drop modules without state or within others; add what only optimizers have."""
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
    """Return what functions can use.

    Args:
        starts: Functions of the user's code, and other objects that they are given.
        steps_to_body: Names that may lead from them to the body of a loop, whose reach is as far.
    """
    found = Reach()
    seen: set[int] = set()
    kept: list[object] = []  # so that no identity comes twice
    for one in starts:
        _visit(one, "", found, seen, kept, -steps_to_body)
    # What hangs on a part of a model is found however deep that part lies.
    for module in list(found.modules.values()):
        for part in module.modules():
            for name, inner in _inside(part):
                _visit(inner, name, found, seen, kept, 1)
    found.tidy()
    return found


@contextmanager
def failures_told(module: nn.Module) -> Iterator[None]:
    """Let queues that a module can use know when it cannot be compiled: their readers may wait."""
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
    if id(value) in seen or depth > _MAX_DEPTH:
        return
    seen.add(id(value))
    kept.append(value)
    if isinstance(value, HasModel):
        value = value._user_model
    if isinstance(value, InfeedQueue):
        return  # what it takes elements of is its own
    kinds = (nn.Parameter, torch.optim.Optimizer, OutfeedQueue, nn.Module, Iterator)
    if isinstance(value, kinds):
        found.add(value, name)
    for inner_name, inner in _inside(value):
        _visit(inner, inner_name, found, seen, kept, depth + 1)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object leads to, with a name for it."""
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
        # Whatever else hangs on a class turns up while the function is traced.
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
        except ValueError:  # nothing is there yet
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
    """Yield the names that code and the functions inside of it mention."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _mentioned(constant)
