"""Reports mistakes in calls of torch functions with the errors of eager PyTorch.

The shapes of traced tensors are computed by other code of PyTorch than its kernels. That code finds
the same mistakes, but many of its messages differ, and mention tensors that users do not know.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from popsim_torch.errors import Error
from popsim_torch.private_torch.fake import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from popsim_torch.private_torch.tensors import storage_key
from popsim_torch.private_torch.trees import tree_leaves, tree_map
from popsim_torch.trace.graph.traced_tensors import host_computation, in_transform, is_traced

__all__ = ["eager_error", "error_on_host", "without_fakes"]

# Exceptions of a trace that do not mean that the call is wrong.
_OF_THE_TRACE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    Error,
)
_MAX_ELEMENTS = 2**24  # of the host tensors for the trial call


def eager_error(
    error: Exception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Exception | None:
    """Return the exception with which a call fails outside of a trace, if it does.

    The call is repeated with host tensors that are full of zeros.

    Args:
        error: The exception with which it failed on traced tensors.
        func: A function of torch.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if isinstance(error, _OF_THE_TRACE) or in_transform():
        return None
    return error_on_host(func, args, kwargs)


def error_on_host(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    same_memory: bool = False,
) -> Exception | None:
    """Return the exception with which a call fails on host tensors that are full of zeros.

    Args:
        func: A function of torch.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        same_memory: Whether host tensors share memory if the traced tensors do.
    """
    traced = [value for value in tree_leaves((args, kwargs)) if is_traced(value)]
    if sum(tensor.numel() for tensor in traced) > _MAX_ELEMENTS:
        return None
    memories = _Memories() if same_memory else None

    def on_host(value: Any) -> Any:
        return memories.view(value) if memories and is_traced(value) else _on_host(value)

    with host_computation(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            args, kwargs = tree_map(on_host, (args, kwargs), is_leaf=_is_size)
            func(*args, **kwargs)
        except Exception as found:
            return found.with_traceback(None)
    return None


def _is_size(value: Any) -> bool:
    """Return whether a value is a shape; mapping it like other tuples would make a plain tuple."""
    return isinstance(value, torch.Size)


def _on_host(value: Any) -> Any:
    if is_traced(value):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()
    if isinstance(value, torch.device) and value.type == "ipu":
        return torch.device("cpu")
    return value


class _Memories:
    """Memory of the host for that of traced tensors, full of zeros."""

    def __init__(self) -> None:
        self._bytes: dict[int, torch.Tensor] = {}

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the host tensor that has the memory of a traced tensor."""
        memory = tensor.untyped_storage()
        key = storage_key(tensor)
        if key not in self._bytes:
            self._bytes[key] = torch.zeros(memory.nbytes(), dtype=torch.uint8, device="cpu")
        elements = self._bytes[key].view(tensor.dtype)
        return elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def without_fakes(error: BaseException) -> None:
    """Replace the names of fake tensor classes in the message of an exception."""
    error.args = tuple(
        part.replace("FakeTensor", "Tensor") if isinstance(part, str) else part
        for part in error.args
    )
