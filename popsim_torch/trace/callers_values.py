"""Changes of the arguments of forward that its caller does not see.

Forward runs once, with containers that are copies of the caller's.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from popsim_torch import logs
from popsim_torch.arguments import tensors_inside
from popsim_torch.errors import Error
from popsim_torch.private_torch.tensors import storage_key
from popsim_torch.trace.graph.functionalise import unchanged
from popsim_torch.trace.graph.traced_tensors import find_node, is_traced

__all__ = ["watched_arguments"]

_NO_OBJECTS = (torch.Tensor, nn.Module, type)


@contextmanager
def watched_arguments(
    given: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]
) -> Iterator[None]:
    """Report changes of arguments after forward, which runs in this scope.

    Args:
        given: The arguments of forward, by the names of its parameters.
        inputs: The traced tensors in them, by their names.

    Raises:
        Error: Forward has put a tensor of the device into an object of the caller.
    """
    parts = [part for name, value in given.items() for part in _parts(name, value)]
    before = [(name, value, _contents(value)) for name, value in parts]
    # (a storage that is kept keeps its key)
    data = {name: (find_node(one), one.untyped_storage()) for name, one in inputs.items()}
    keys = {name: storage_key(one) for name, one in inputs.items()}
    yield
    for name, value, contents in before:
        if not _is_same(contents, _contents(value)):
            _report(name, value, is_copy=isinstance(value, (list, dict)) or bool(contents))
    for name, (node, _) in data.items():
        now = find_node(inputs[name])
        if now is None or unchanged(now) is node:  # (changes in place reach the caller)
            continue
        if storage_key(inputs[name]) != keys[name]:
            logs.python.warning(
                "forward assigns other data to the input %s (%s.data = ...). The tensor of the "
                "caller keeps its own. Change it in place (%s.copy_(value)), or return the values.",
                *(name, name, name),
            )


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the containers and objects in an argument, with their names."""
    if isinstance(value, dict):
        inside = [(f"{name}[{key}]", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        inside = [(f"{name}[{index}]", item) for index, item in enumerate(value)]
    else:
        inside = []
    if not isinstance(value, (tuple, *_NO_OBJECTS)):
        yield name, value
    for path, item in inside:
        yield from _parts(path, item)


def _contents(value: Any) -> list[Any]:
    """Return the keys and items of a container, or the traced tensors of an object."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list):
        return list(value)
    return [tensor for tensor in tensors_inside(value) if is_traced(tensor)]


def _is_same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(map(operator.is_, before, now))


def _report(name: str, value: Any, *, is_copy: bool) -> None:
    """Warn of the change of a copy of the caller's object, and refuse a change of that object."""
    kind = type(value).__name__
    if not is_copy:
        raise Error(
            f"forward puts a tensor of the device into the {kind} that is passed as {name}. It "
            "runs once, when the model is compiled, and that tensor never has values for the "
            "caller. Return it from forward."
        )
    logs.python.warning(
        "forward changes the %s that is passed as %s. It gets a copy, and runs once, when the "
        "model is compiled: the caller's %s stays as it is, in this call and in all others. "
        "Return the values, or change a tensor in it in place (copy_).",
        *(kind, name, kind),
    )
