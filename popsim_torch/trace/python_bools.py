"""Arithmetic of tensors with Python's ``True`` and ``False``, and shifts with tensors of bools.

The shape rules of PyTorch take them for numbers, also where its kernels refuse them, and operators
that take two tensors have no kernel for a tensor and a bool.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from popsim_torch.private_torch.trees import tree_map
from popsim_torch.trace.eager_errors import error_on_host
from popsim_torch.trace.graph.device import DEVICE
from popsim_torch.trace.graph.traced_tensors import in_transform, is_traced

__all__ = ["power_of_bools", "shift_of_bools", "without_bools"]

_ARITHMETIC = frozenset({"add", "sub", "subtract", "rsub", "mul", "multiply", "pow"})
_ARITHMETIC |= {"div", "divide", "true_divide", "floor_divide", "truediv", "floordiv"}
_ARITHMETIC |= {"remainder", "fmod", "mod", "clamp", "clip", "clamp_min", "clamp_max"}
_SHIFTS = frozenset({"__lshift__", "__rshift__", "__ilshift__", "__irshift__"})
_OF_THE_ZEROS = "ZeroDivisionError"  # the trial call has zeros for values that are not known


def without_bools(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call without Python bools that stand for a number.

    Args:
        func: A function of torch.
        name: Its name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        Exception: Eager PyTorch refuses the call.
    """
    operation = _operation(name)
    values = (*args, *kwargs.values())
    if operation not in _ARITHMETIC or not any(isinstance(value, bool) for value in values):
        return args, kwargs
    error = None if in_transform() else error_on_host(func, args, kwargs)
    if error is not None and str(error) != _OF_THE_ZEROS:
        raise error
    tensors = [value for value in values if is_traced(value)]
    if any(one.dtype != torch.bool for one in tensors):
        return _replaced(int, args, kwargs)
    if operation == "pow":  # takes a number
        return args, kwargs
    factor = {"alpha": kwargs["alpha"]} if "alpha" in kwargs else {}  # another number
    args, kwargs = _replaced(lambda value: torch.full((), value, device=DEVICE), args, kwargs)
    return args, {**kwargs, **factor}


def power_of_bools(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return a replacement of a tensor of bools to the power of a Python bool; else None.

    Args:
        name: The name of a function of torch.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if _operation(name) != "pow" or name == "__rpow__" or len(args) != 2 or kwargs:
        return None
    base, exponent = args
    if not isinstance(exponent, bool) or not isinstance(base, torch.Tensor):
        return None
    if base.dtype != torch.bool:
        return None
    is_changed = name in ("pow_", "__ipow__")
    return functools.partial(_power, base, exponent, is_changed)


def shift_of_bools(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return a replacement of a shift of, or by, a tensor of bools; else None.

    Args:
        func: A function of torch.
        name: Its name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if name not in _SHIFTS or len(args) != 2 or kwargs:
        return None
    bools = [isinstance(one, torch.Tensor) and one.dtype == torch.bool for one in args]
    common = torch.result_type(*args)
    if common == torch.bool or not any(bools) or (bools[0] and name.startswith("__i")):
        return None  # no bools, or eager PyTorch refuses the call
    held = (one.to(common) if is_bool else one for one, is_bool in zip(args, bools, strict=True))
    return functools.partial(func, *held)


def _power(base: torch.Tensor, exponent: bool, is_changed: bool) -> torch.Tensor:
    result = base.clone() if exponent else torch.ones_like(base)
    return base.copy_(result) if is_changed else result


def _operation(name: str) -> str:
    """Return the name of an operation for its variants: ``__radd__``, ``add_``, ``add.Tensor``."""
    name = name.partition(".")[0]
    if not name.startswith("__"):
        return name.removesuffix("_")
    name = name.strip("_")
    return name if name in _ARITHMETIC else name[1:]


def _replaced(
    function: Callable[[bool], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def replaced(value: Any) -> Any:
        return function(value) if isinstance(value, bool) else value

    args, kwargs = tree_map(replaced, (args, kwargs))
    return args, kwargs
