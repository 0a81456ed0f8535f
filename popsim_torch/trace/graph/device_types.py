"""Dtypes in forward: numbers of the device have 32 bits at most.

A tensor that forward makes as float64 or bfloat16 is float32. Integers of 64 bits keep their width
internally, because PyTorch's kernels need it for indices. But forward sees int32, and may use any
integer dtype as indices and for values that are written into other integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from popsim_torch.dtypes import held_dtype, returned_dtype
from popsim_torch.errors import Error
from popsim_torch.private_torch.tensors import ask_for_gradient, asks_for_gradient, storage_key
from popsim_torch.private_torch.trees import tree_map
from popsim_torch.trace.graph.device import DEVICE
from popsim_torch.trace.graph.traced_tensors import host_computation, is_traced


def _cfloat(tensor: torch.Tensor, **settings: Any) -> torch.Tensor:
    """Convert to complex64."""
    return tensor.to(torch.complex64, **settings)


_CASTS: dict[str, Callable[..., Any]] = {
    "double": torch.Tensor.float,
    "bfloat16": torch.Tensor.float,
    "cdouble": _cfloat,
}
# Functions that read memory as another dtype.
_REINTERPRETS = frozenset({"view"})

# Functions whose index arguments must be int64 in PyTorch.
_INDICES = {
    "cross_entropy_loss": (1, "target"),
    "gather": (2, "index"),
    "multi_margin_loss": (1, "target"),
    "nll_loss": (1, "target"),
    "nll_loss2d": (1, "target"),
    "nll_loss_nd": (1, "target"),
    "one_hot": (0, "tensor"),
    "scatter": (2, "index"),
    "scatter_add": (2, "index"),
    "scatter_reduce": (2, "index"),
    "take": (1, "index"),
    "take_along_dim": (1, "indices"),
}
# Functions that write arguments into their first argument; these must have its dtype.
_SOURCES = {
    "__setitem__": (2, "value"),
    "dynamic_update": (1, "part"),
    "index_add": (3, "source"),
    "index_copy": (3, "source"),
    "index_put": (2, "values"),
    "masked_scatter": (2, "source"),
    "scatter": (3, "src"),
    "scatter_add": (3, "src"),
    "scatter_reduce": (3, "src"),
}
_CPU = torch.device("cpu")
_OF_CLASSES = (_CPU, torch.device(DEVICE.type))  # (the latter of x.new(2, 3) in gradients)
_INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8})


def seen_dtype(dtype: Any) -> Any:
    """Return the dtype of a device tensor as forward sees it.

    Args:
        dtype: The dtype of the traced tensor; any other value is returned unchanged.
    """
    return returned_dtype(dtype) if isinstance(dtype, torch.dtype) else dtype


def note_requires_grad(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Note a call that sets ``requires_grad``, which a parameter in inference does not keep.

    Args:
        func: Any function of torch.
        name: Its name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    is_set = name == "__set__" and getattr(func, "__self__", None) is torch.Tensor.requires_grad
    if (is_set or name == "requires_grad_") and is_traced(args[0]):
        ask_for_gradient(args[0], bool((*args, kwargs.get("requires_grad", True))[1]))


def as_seen(getter: Callable[..., Any], tensor: torch.Tensor, value: Any) -> Any:
    """Return the value that forward sees when it reads an attribute of a device tensor.

    Args:
        getter: The getter of the attribute.
        tensor: The traced tensor.
        value: The attribute of the tensor that the device holds.
    """
    attribute = getattr(getter, "__self__", None)
    if attribute is torch.Tensor.requires_grad:
        return value or asks_for_gradient(tensor)
    if attribute is torch.Tensor.itemsize:
        return seen_dtype(tensor.dtype).itemsize
    if attribute is torch.Tensor.nbytes:
        return tensor.numel() * seen_dtype(tensor.dtype).itemsize
    return seen_dtype(value)


def as_device_types(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the call with unsupported dtypes replaced by dtypes of the device.

    Args:
        func: A function of torch.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    name = getattr(func, "__name__", "")
    if name in _CASTS:
        func = _CASTS[name]
    elif func is torch.Tensor.element_size and is_traced(args[0]):
        func = _element_size
    elif func is torch.Tensor.data_ptr and is_traced(args[0]):
        func = _address
    elif func is torch.Tensor.type and is_traced(args[0]):
        func, args, kwargs = _type_call(*args, **kwargs)
    elif name in _REINTERPRETS:
        args = _reinterpretable(args, kwargs)
    else:
        args, kwargs = tree_map(_held, (args, kwargs), is_leaf=lambda v: isinstance(v, torch.Size))
    key = name if name in _SOURCES else name.removesuffix("_")
    if key in _INDICES:
        args, kwargs = _with(_long, _INDICES[key], args, kwargs)
    if key in _SOURCES and args and _is_integer(args[0]):
        dtype = args[0].dtype

        def fitting(value: Any) -> Any:
            return value.to(dtype) if _is_integer(value) else value

        args, kwargs = _with(fitting, _SOURCES[key], args, kwargs)
    return func, args, kwargs


def made_by_class(operator: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an operator; those of ``torch.FloatTensor(2, 3)`` are of the device.

    Such a call is no function of torch, so the operator is the first that a mode sees.

    Args:
        operator: An ATen operator.
        kwargs: Its keyword arguments.
    """
    is_empty = operator is torch.ops.aten.empty.memory_format
    if not is_empty or kwargs.get("device", _CPU) not in _OF_CLASSES:
        return kwargs
    return {**kwargs, "dtype": _held(kwargs.get("dtype")), "device": DEVICE}


def _address(tensor: torch.Tensor) -> int:
    """Return a number that only the first elements of the same memory have in common."""
    place = int(tensor.storage_offset()) * tensor.element_size()
    return (storage_key(tensor) << 48) + place


def _element_size(tensor: torch.Tensor) -> int:
    """Return the number of bytes of an element as forward sees it."""
    return int(seen_dtype(tensor.dtype).itemsize)


def _type_call(
    tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the call of ``Tensor.type`` without a class of tensors, which has a device."""
    if dtype is None:
        return _type_name, (tensor,), {}
    if not isinstance(dtype, torch.dtype):
        with host_computation():
            dtype = torch.empty(0).type(dtype).dtype
    return torch.Tensor.to, (tensor, held_dtype(dtype)), {}


def _type_name(tensor: torch.Tensor) -> str:
    """Return the name of the host's class of tensors with a dtype: ``torch.FloatTensor``."""
    with host_computation():
        return torch.empty(0, dtype=seen_dtype(tensor.dtype)).type()


def _reinterpretable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of ``view`` with a tensor of the dtype that forward sees."""
    for dtype in (*args[1:], *kwargs.values()):
        if not isinstance(dtype, torch.dtype):
            continue
        if held_dtype(dtype) != dtype or returned_dtype(dtype) != dtype:
            raise Error(
                f"view({dtype}): the device does not support this dtype to read memory as. Use "
                "one that it supports, such as torch.int32, or convert the values: to(dtype)."
            )
        return args[0].to(seen_dtype(args[0].dtype)), *args[1:]
    return args


def _held(value: Any) -> Any:
    return held_dtype(value) if isinstance(value, torch.dtype) else value


def _long(value: Any) -> Any:
    return value.long() if _is_integer(value) else value


def _is_integer(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _INTEGERS


def _with(
    change: Callable[[Any], Any],
    place: tuple[int, str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with one of them changed, by its position or its keyword."""
    position, keyword = place
    if len(args) > position:
        args = (*args[:position], change(args[position]), *args[position + 1 :])
    elif keyword in kwargs:
        kwargs = {**kwargs, keyword: change(kwargs[keyword])}
    return args, kwargs
