"""Custom operators whose kernels are written in Python, registered through the C interface."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from popsim_torch import _native
from popsim_torch.custom_ops import abi
from popsim_torch.dtypes import returned_dtype
from popsim_torch.errors import UsageTypeError, UsageValueError

__all__ = ["PythonOp", "register_custom_op"]

# Kept until the process ends, because compiled programs may still call these functions.
_kept: list[Any] = []


class PythonOp:
    """A custom operator in Python, which :func:`register_custom_op` makes from its kernel.

    Calling the object calls the kernel. Its methods are decorators, which return the function.

    Args:
        kernel: Computes the outputs.
        domain: The domain of the operator.
        name: The name of the operator.
        version: The version of the operator.
    """

    def __init__(self, kernel: Callable[..., Any], domain: str, name: str, version: int) -> None:
        self._kernel = kernel
        functools.update_wrapper(self, kernel)
        self._entry = abi.OpEntry(
            domain=domain.encode(), name=name.encode(), version=version, alone=1
        )
        self._entry.kernel = _for_c(abi.Function, _compute, kernel)
        _kept.append(self._entry)
        _native.add_custom_op(ctypes.addressof(self._entry))

    def __call__(self, *inputs: torch.Tensor, **attributes: Any) -> Any:
        """Call the kernel."""
        return self._kernel(*inputs, **attributes)

    def shapes(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Set the shape rule: ``function(*inputs, **attributes)`` returns empty outputs.

        The inputs are on the device ``meta``: they have a shape and a dtype, but no values. The
        function raises an error for inputs that the kernel cannot compute. Without a shape rule
        ``example_outputs`` are used, and compared with the results of the kernel.
        """
        self._entry.shapes = _for_c(abi.Function, _declare, function)
        return function

    def gradient(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Set the kernel of the gradient.

        ``function(*inputs, *outputs, *gradients, **attributes)`` gets a gradient for each
        floating-point output (zeros if there is none) and returns one for each floating-point
        input.
        """
        self._entry.gradient = _for_c(abi.Function, _compute, function)
        return function

    def cost(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Set the cost of the kernel: ``function(*inputs, **attributes)`` returns its flops.

        It may also return flops and bytes. The inputs have no values. Without a cost only the
        operands count.
        """
        self._entry.cost = _for_c(abi.CostFunction, _count, function)
        return function

    def gradient_cost(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Set the cost of the gradient; the function gets the inputs of the gradient's kernel."""
        self._entry.gradient_cost = _for_c(abi.CostFunction, _count, function)
        return function


def register_custom_op(
    name: str, domain: str, version: int = 1
) -> Callable[[Callable[..., Any]], PythonOp]:
    """Return a decorator that registers a kernel in Python for :func:`custom_op`.

    The kernel ``function(*inputs, **attributes)`` is called whenever the device computes the
    operator. It gets its own CPU tensors, and returns one or several tensors. It runs on one
    thread. If several operators have the same name, the last one is used; compiled models keep the
    operator that they were compiled with.

    Args:
        name: The name of the operator for ``custom_op``.
        domain: The domain of the operator for ``custom_op``.
        version: The version of the operator, ``domain_version`` of ``custom_op``.

    Raises:
        UsageTypeError: The name or the domain is not a string, or the version is not an int.
        UsageValueError: The name or the domain is empty, or not ASCII.

    Example:
        ::

            @poptorch.register_custom_op("Cube", domain="com.acme")
            def cube(x, scale=1.0):
                return scale * x**3

            @cube.shapes
            def _(x, scale=1.0):
                return torch.empty_like(x)

            @cube.gradient
            def _(x, y, gradient, scale=1.0):
                return 3.0 * scale * x**2 * gradient
    """
    for what, value in (("name", name), ("domain", domain)):
        if not isinstance(value, str):
            raise UsageTypeError(
                f"register_custom_op: the {what} must be a str, got {type(value).__name__}"
            )
        if not value.isascii() or not value or "\0" in value:
            raise UsageValueError(f"register_custom_op: the {what} must be ASCII, got {value!r}")
    if not isinstance(version, int):
        raise UsageTypeError(f"register_custom_op: the version must be an int, got {version!r}")

    def register(kernel: Callable[..., Any]) -> PythonOp:
        _native.look_for_custom_ops([])  # libraries that are loaded so far come first
        return PythonOp(kernel, domain, name, version)

    return register


def _for_c(kind: Any, does: Callable[..., None], function: Callable[..., Any]) -> Any:
    """Return a C function that calls a function of the user.

    Args:
        kind: The type of the C function.
        does: Called with the user's function and the arguments of the C function.
        function: The user's function. Its exceptions become error messages.
    """

    def call(pointer: Any, *more: Any) -> int:
        try:
            with torch.inference_mode(False), torch.no_grad():
                does(function, pointer, *more)
            return 0
        except BaseException as error:
            return abi.fail(pointer, f"{type(error).__name__}: {error}")

    _kept.append(kind(call))
    return _kept[-1]


def _inputs(call: Any) -> list[torch.Tensor]:
    # Copy the inputs, because the kernel must not keep or change the memory of the device.
    return [abi.tensor_of(given).clone() for given in call.inputs[: call.num_inputs]]


def _results(function: Callable[..., Any], call: Any) -> Sequence[torch.Tensor]:
    results = function(*_inputs(call), **abi.attributes_of(call))
    if isinstance(results, torch.Tensor):
        results = [results]
    if not isinstance(results, (list, tuple)) or not all(
        isinstance(result, torch.Tensor) for result in results
    ):
        raise TypeError(f"it must return a tensor, or a list of tensors, got {results!r:.100}")
    return results


def _compute(function: Callable[..., Any], pointer: Any) -> None:
    call = pointer.contents
    results = _results(function, call)
    if len(results) != call.num_outputs:
        raise ValueError(f"it returned {len(results)} tensors instead of {call.num_outputs}")
    for i, (result, output) in enumerate(zip(results, call.outputs[: len(results)], strict=True)):
        shape, dtype = abi.shape_of(output), abi.DTYPES[output.dtype]
        if tuple(result.shape) != shape or returned_dtype(result.dtype) != dtype:
            raise ValueError(
                f"its result {i} has shape {tuple(result.shape)} and type {result.dtype} instead "
                f"of {shape} and {dtype}"
            )
        abi.tensor_of(output).copy_(result)


def _declare(function: Callable[..., Any], pointer: Any) -> None:
    for result in _results(function, pointer.contents):
        dtype = returned_dtype(result.dtype)
        if dtype not in abi.DTYPES:
            raise TypeError(f"the device has no {result.dtype}")
        abi.declare(pointer, torch.empty(result.shape, dtype=dtype, device="meta"))


def _count(function: Callable[..., Any], pointer: Any, cost: Any) -> None:
    call = pointer.contents
    counted = function(*_inputs(call), **abi.attributes_of(call))
    flops, *rest = counted if isinstance(counted, (list, tuple)) else [counted]
    cost.contents.flops = float(flops)
    cost.contents.bytes = float(rest[0]) if rest else 0.0
