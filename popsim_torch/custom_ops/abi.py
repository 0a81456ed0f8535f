"""``popsim_custom_op.h`` as ctypes structures, to register operators that are written in Python."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "DTYPES",
    "CallPointer",
    "CostFunction",
    "Function",
    "OpEntry",
    "attributes_of",
    "custom_op_include",
    "fail",
    "shape_of",
    "tensor_of",
]


def custom_op_include() -> str:
    """Return the folder of ``popsim_custom_op.h``, for ``c++ -I``."""
    return str(Path(__file__).parents[1] / "include")


DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.float16,
    torch.float32,
)
"""The dtypes of the device, by their numbers in the header."""


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("rank", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("values", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("is_list", ctypes.c_int32),
    )


class _Call(ctypes.Structure):
    pass


CallPointer: Any = ctypes.POINTER(_Call)
_Declare = ctypes.CFUNCTYPE(
    None, CallPointer, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_int64)
)
_Fail = ctypes.CFUNCTYPE(None, CallPointer, ctypes.c_char_p)
_Call._fields_ = (
    ("inputs", ctypes.POINTER(_Tensor)),
    ("outputs", ctypes.POINTER(_Tensor)),
    ("attributes", ctypes.POINTER(_Attribute)),
    ("num_inputs", ctypes.c_int64),
    ("num_outputs", ctypes.c_int64),
    ("num_attributes", ctypes.c_int64),
    ("declare", _Declare),
    ("fail", _Fail),
    ("share", ctypes.c_void_p),
)


class Cost(ctypes.Structure):
    """``popsim_custom_cost``."""

    _fields_ = (("flops", ctypes.c_double), ("bytes", ctypes.c_double))


Function = ctypes.CFUNCTYPE(ctypes.c_int, CallPointer)
CostFunction = ctypes.CFUNCTYPE(ctypes.c_int, CallPointer, ctypes.POINTER(Cost))


class OpEntry(ctypes.Structure):
    """``popsim_custom_op``."""

    _fields_ = (
        ("next", ctypes.c_void_p),
        ("domain", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("version", ctypes.c_int64),
        ("shapes", Function),
        ("kernel", Function),
        ("gradient", Function),
        ("cost", CostFunction),
        ("gradient_cost", CostFunction),
        ("alone", ctypes.c_int32),
    )


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the shape of a ``popsim_tensor``."""
    return tuple(tensor.shape[: tensor.rank])


def tensor_of(tensor: Any) -> torch.Tensor:
    """Return a ``popsim_tensor`` as a PyTorch tensor with the same memory, or on ``meta``."""
    shape, dtype = shape_of(tensor), DTYPES[tensor.dtype]
    if not tensor.data:
        return torch.empty(shape, dtype=dtype, device="meta")
    size = torch.Size(shape).numel() * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_char * size).from_address(tensor.data)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


_VALUES: tuple[Any, ...] = (ctypes.c_int64, ctypes.c_double, ctypes.c_char_p)


def attributes_of(call: Any) -> dict[str, Any]:
    """Return the attributes of a ``popsim_call``."""
    found: dict[str, Any] = {}
    for given in call.attributes[: call.num_attributes]:
        items = (_VALUES[given.type] * given.count).from_address(given.values)[:]
        items = [item.decode() if isinstance(item, bytes) else item for item in items]
        found[given.name.decode()] = items if given.is_list else items[0]
    return found


def declare(pointer: Any, tensor: torch.Tensor) -> None:
    """Declare the next output of a shape rule, with the shape and dtype of a tensor."""
    shape = (ctypes.c_int64 * tensor.dim())(*tensor.shape)
    pointer.contents.declare(pointer, DTYPES.index(tensor.dtype), tensor.dim(), shape)


def fail(pointer: Any, message: str) -> int:
    """Report why a function fails, and return the code for a failure."""
    pointer.contents.fail(pointer, message.encode(errors="backslashreplace"))
    return 1
