"""Python's functions of numbers while a step is traced: they take numbers of the device, too."""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from popsim_torch.optimizer_steps.numbers import FUNCTIONS, StepNumber
from popsim_torch.private_torch.modes import DisableTorchFunction

__all__ = ["namespaces_of", "python_numbers"]


def _mathematical(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any) -> Any:
        if not any(isinstance(one, StepNumber) for one in args):
            return original(*args)
        if name == "pow":
            return args[0] ** args[1]
        if name == "fabs":
            return abs(args[0])
        if name == "log" and len(args) == 2:
            numerator, base = (
                one.unary("log") if isinstance(one, StepNumber) else original(one) for one in args
            )
            return numerator / base
        if name not in FUNCTIONS:
            return original(*args)  # asks for the value
        return args[0].unary(name)

    return function


def _choosing(name: str) -> Callable[..., Any]:
    original = getattr(builtins, name)

    def function(*args: Any, **options: Any) -> Any:
        values = list(args[0]) if len(args) == 1 else list(args)
        numbers = any(isinstance(one, StepNumber) for one in values)
        tensors = any(isinstance(one, torch.Tensor) for one in values)
        if options or not (numbers or tensors) or not all(map(_is_number, values)):
            return original(*args, **options)
        if tensors:
            return functools.reduce(functools.partial(_better, name), values)
        best = values[0]
        for value in values[1:]:
            number = best if isinstance(best, StepNumber) else value
            if not isinstance(number, StepNumber):
                best = original(best, value)
            else:
                best = number.binary(name, best, value)
        return best

    return function


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, or a tensor of one element."""
    with DisableTorchFunction():
        if isinstance(value, torch.Tensor):
            return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float, StepNumber))


def _better(name: str, best: Any, value: Any) -> Any:
    """Return one of two values as Python's ``max`` or ``min`` does; one may be a tensor."""
    tensors = [one for one in (best, value) if isinstance(one, torch.Tensor)]
    if not tensors:
        return _choosing(name)(best, value)
    with DisableTorchFunction():
        shape, dtype = tensors[0].shape, torch.result_type(tensors[0], tensors[-1])
        if len(tensors) == 1 and not dtype.is_floating_point:
            dtype = torch.float32
    first, second = (
        one.to(dtype).reshape(shape)
        if isinstance(one, torch.Tensor)
        else torch.full(shape, one, dtype=dtype)
        for one in (best, value)
    )
    better = second > first if name == "max" else second < first
    return torch.where(better, second, first)


def namespaces_of(kind: type[Any]) -> list[dict[str, Any]]:
    """Return the global names of the code of a class and its base classes."""
    found: dict[int, dict[str, Any]] = {}
    for one in kind.__mro__:
        for member in vars(one).values():
            names = getattr(inspect.unwrap(member), "__globals__", None)
            if isinstance(names, dict):
                found[id(names)] = names
    return list(found.values())


@contextlib.contextmanager
def python_numbers(kind: type[Any]) -> Iterator[None]:
    """Let Python's functions of numbers record numbers of the device while the context lasts.

    Args:
        kind: The class of the optimizer: the modules of it and its base classes have the code.
    """
    originals: dict[Any, Callable[..., Any]] = {}
    for name in (*FUNCTIONS, "pow", "fabs"):
        original = getattr(math, name, None)
        if original is not None:
            originals[original] = _mathematical(name, original)
    places: list[tuple[dict[str, Any], str, Any]] = []
    missing = object()

    def put(names: dict[str, Any], name: str, value: Any) -> None:
        places.append((names, name, names.get(name, missing)))
        names[name] = value

    try:
        for original, function in originals.items():
            put(vars(math), original.__name__, function)
        for names in namespaces_of(kind):
            for name, value in list(names.items()):
                if isinstance(value, type(math.sqrt)) and value in originals:
                    put(names, name, originals[value])
            for name in ("max", "min"):
                if name not in names:
                    put(names, name, _choosing(name))
        yield
    finally:
        for names, name, before in reversed(places):
            if before is missing:
                del names[name]
            else:
                names[name] = before
