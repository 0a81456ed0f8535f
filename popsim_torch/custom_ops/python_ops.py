"""Custom operators whose kernels are written in Python, registered in the form of the C header."""

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

# Programs may call what they were compiled with as long as the process lives.
_kept: list[Any] = []


class PythonOp:
    """A custom operator in Python; what :func:`register_custom_op` makes of its kernel.

    Calling it calls the kernel. Its methods are decorators, which return the function.

    Args:
        kernel: Computes the outputs.
        domain: Of the operator.
        name: Of the operator.
        version: Of the operator.
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

        Inputs are on the device ``meta``: they have a shape and an element type and no values. It
        refuses what the kernel cannot compute. Without it ``example_outputs`` are believed, and
        compared with what the kernel returns.
        """
        self._entry.shapes = _for_c(abi.Function, _declare, function)
        return function

    def gradient(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Set the kernel of the gradient.

        ``function(*inputs, *outputs, *gradients, **attributes)`` is given a gradient for each
        floating-point output (zeros where none arrives) and returns one for each floating-point
        input.
        """
        self._entry.gradient = _for_c(abi.Function, _compute, function)
        return function

    def cost(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Set what the kernel has to do: ``function(*inputs, **attributes)`` returns its flops.

        Or flops and bytes. Inputs have no values. Without it only its operands count.
        """
        self._entry.cost = _for_c(abi.CostFunction, _count, function)
        return function

    def gradient_cost(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Set the same for the gradient, whose inputs the function is given."""
        self._entry.gradient_cost = _for_c(abi.CostFunction, _count, function)
        return function


def register_custom_op(
    name: str, domain: str, version: int = 1
) -> Callable[[Callable[..., Any]], PythonOp]:
    """Return a decorator that registers a kernel in Python for :func:`custom_op`.

    The kernel ``function(*inputs, **attributes)`` is called whenever the device computes the
    operator, with CPU tensors of its own, and returns a tensor or several. It runs on one thread.
    Of several operators with one name the last one counts; models keep the one that they were
    compiled with.

    Args:
        name: What ``custom_op`` calls the operator.
        domain: The same.
        version: The same, ``domain_version`` there.

    Raises:
        UsageTypeError: The name or the domain is no str, or the version no int.
        UsageValueError: They are no ASCII text, or empty.

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
        _native.look_for_custom_ops([])  # what is loaded by now comes before
        return PythonOp(kernel, domain, name, version)

    return register


def _for_c(kind: Any, does: Callable[..., None], function: Callable[..., Any]) -> Any:
    """Return a function of C that does something with a function of the user's.

    Args:
        kind: The type of the function of C.
        does: Is given the user's function and what the function of C is.
        function: The user's. What it raises becomes text.
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
    # The device's own memory is nothing to keep or to change.
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
