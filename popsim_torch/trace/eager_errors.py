"""Mistakes in calls of torch functions are reported as eager PyTorch reports them.

The shapes of traced tensors are computed by code of PyTorch that finds the same mistakes as its
kernels do, but describes many of them differently, and speaks of tensors that programs do not know.
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
from popsim_torch.private_torch.trees import tree_leaves, tree_map
from popsim_torch.trace.graph.traced_tensors import host_computation, in_transform, is_traced

__all__ = ["eager_error", "without_fakes"]

# What calls may fail with although nothing is wrong with them.
_OF_THE_TRACE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    Error,
)
_MAX_ELEMENTS = 2**24  # of the host tensors that a call is tried with


def eager_error(
    error: Exception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Exception | None:
    """Return the exception with which a call fails outside of a trace, if it does.

    The call is tried with tensors of the host that are full of zeros.

    Args:
        error: The exception with which it failed on traced tensors.
        func: A function of torch.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if isinstance(error, _OF_THE_TRACE) or in_transform():
        return None
    traced = [value for value in tree_leaves((args, kwargs)) if is_traced(value)]
    if sum(tensor.numel() for tensor in traced) > _MAX_ELEMENTS:
        return None
    with host_computation(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            args, kwargs = tree_map(_on_host, (args, kwargs), is_leaf=_is_size)
            func(*args, **kwargs)
        except Exception as found:
            return found.with_traceback(None)
    return None


def _is_size(value: Any) -> bool:
    """Whether a value is a shape; mapped like other tuples, it would become a plain one."""
    return isinstance(value, torch.Size)


def _on_host(value: Any) -> Any:
    if is_traced(value):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()
    if isinstance(value, torch.device) and value.type == "ipu":
        return torch.device("cpu")
    return value


def without_fakes(error: BaseException) -> None:
    """Call tensors by their name in the text of an exception."""
    error.args = tuple(
        part.replace("FakeTensor", "Tensor") if isinstance(part, str) else part
        for part in error.args
    )
