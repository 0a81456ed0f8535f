"""Calls that make a tensor from Python numbers, NumPy arrays or other tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from popsim_torch.errors import Error
from popsim_torch.private_torch.trees import tree_map
from popsim_torch.trace.call_arguments import warn_of_no_device
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.trace.graph.traced_tensors import host_computation, is_traced

_FROM_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
_METHODS = frozenset({"new", "new_tensor"})


class HostData(Protocol):
    """The tracer's knowledge of host tensors."""

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a traced tensor for the data of a host tensor."""

    def known_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a traced tensor; None if they differ from run to run."""


def makes_tensor_of_data(func: Callable[..., Any], name: str) -> bool:
    """Return whether ``tensor_of_data`` computes the result of a call."""
    return func in _FROM_DATA or name in _METHODS


def tensor_of_data(
    host_data: HostData,
    func: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Return the traced tensor that a call makes.

    Args:
        host_data: Makes constants, and knows values.
        func: ``torch.tensor`` or a similar function.
        name: Its name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        Error: The data has numbers of the device in it.
    """
    if func is torch.tensor and kwargs.get("device") is None and not any(map(is_traced, args)):
        warn_of_no_device("tensor")
    settings = {key: value for key, value in kwargs.items() if key != "device"}
    if name == "new":
        source, *sizes = args
        if all(isinstance(size, (int, torch.Size)) for size in sizes):
            return source.new_empty(*sizes or [0])  # type: ignore[no-any-return]
        func, args, settings = torch.tensor, (*sizes,), {"dtype": source.dtype}
    elif name == "new_tensor":
        source, *args = args  # type: ignore[assignment]
        func = torch.tensor
        settings.setdefault("dtype", source.dtype)
    data = args[0] if args else settings.pop("data" if "data" in settings else "obj")
    if is_traced(data):
        return _of_traced(func, data, **settings)
    requires_grad = settings.pop("requires_grad", None)
    data = tree_map(lambda value: _number(host_data, value), data)
    with host_computation():
        host = func(data, device="cpu", **settings)
    result = host_data.constant(host)
    return result.requires_grad_() if requires_grad else result


def _of_traced(
    func: Callable[..., Any],
    data: torch.Tensor,
    dtype: torch.dtype | None = None,
    copy: bool | None = None,
    requires_grad: bool | None = None,
) -> torch.Tensor:
    if func is torch.tensor:
        data, copy = data.detach(), True
    elif requires_grad is False:
        data = data.detach()
    result = data.to(dtype or data.dtype, copy=copy is True)
    return result.requires_grad_() if requires_grad else result


def _number(host_data: HostData, value: Any) -> Any:
    """Return the known value of a traced tensor as a number; any other value as it is."""
    if not is_traced(value):
        return value
    known = host_data.known_value(value)
    if known is None:
        raise Error(
            f"forward{user_line(' at ')} makes a tensor of numbers that are tensors of the device, "
            "which have no values while the model is traced. Write torch.stack([a, b]) instead of "
            "torch.tensor([a, b])."
        )
    return known.tolist()
