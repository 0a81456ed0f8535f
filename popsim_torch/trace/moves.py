"""Moves of tensors in forward from the device to the host or to another device."""

from __future__ import annotations

import copy
from typing import Any

import torch

from popsim_torch.errors import Error
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.trace.graph.traced_tensors import is_host_tensor, is_traced

__all__ = ["check_memory_read", "is_cpu", "leaves_device", "refused_move"]

_LEAVES_DEVICE = frozenset({"cpu", "cuda", "numpy", "__array__"})


def is_cpu(value: object) -> bool:
    """Return whether an argument names the host's device."""
    return _type_of_device(value) == "cpu"


def leaves_device(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call moves a tensor of the device elsewhere.

    Args:
        name: Name of the function of torch.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if not args or not is_traced(args[0]):
        return False
    return name in _LEAVES_DEVICE or (name == "to" and bool(_goals(args, kwargs) & {"cpu", "cuda"}))


def check_memory_read(name: str, target: Any, known: Any) -> None:
    """Refuse reads of the memory of a tensor of the device.

    Args:
        name: Name of the function of torch.
        target: Its first argument in the user's code.
        known: The traced tensor for it, if there is one.

    Raises:
        Error: The call reads the memory of a traced tensor.
    """
    if name != "untyped_storage" or not is_traced(known):
        return
    line = user_line(" at ", (copy.__file__,))
    if is_host_tensor(target):
        raise Error(
            f"forward{line} takes the memory of a tensor of the host that it has changed "
            "(copy.copy, or Tensor.untyped_storage). The device has its values. Write x.view_as(x) "
            "for another tensor with the same memory, or x.clone() for a copy."
        )
    raise Error(
        f"forward{line} takes the memory of a tensor (Tensor.untyped_storage, or Tensor.storage), "
        "which has none while the model is traced. Compare Tensor.data_ptr() to see whether two "
        "tensors share memory."
    )


def refused_move(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Error:
    """Return the error for a call for which ``leaves_device`` is true."""
    if name == "cuda" or "cuda" in _goals(args, kwargs):
        return Error(
            f"Illegal move to a GPU (Tensor.{name}){user_line(' at ')}: inside forward, tensors "
            "live on the device. Remove the call."
        )
    return Error(
        f"Illegal move to CPU (Tensor.{name}){user_line(' at ')}: inside forward, tensors live "
        "on the device. Return the tensor from the model, or anchor it, to see it on the host."
        + (" In arithmetic with an array, use torch.from_numpy(array)." * (name == "__array__"))
    )


def _goals(args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[str]:
    return set(map(_type_of_device, (*args[1:], *kwargs.values())))


def _type_of_device(value: object) -> str:
    """Return the type of the device that an argument names; empty for other values."""
    if isinstance(value, str):
        return value.partition(":")[0]
    return value.type if isinstance(value, torch.device) else ""
