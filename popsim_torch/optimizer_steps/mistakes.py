"""Explains what the step of an optimizer does wrong, or what no device can do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from popsim_torch.errors import Error
from popsim_torch.private_torch.trees import tree_map_only
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.trace.graph.traced_tensors import host_computation

__all__ = ["called", "check_call"]

# Methods that give the memory of a tensor to other libraries.
_LEAVES_TORCH = frozenset({"numpy", "__array__", "data_ptr", "__dlpack__"})


def check_call(name: str) -> None:
    """Refuse a function that reads values of a tensor, which has none while a step is traced.

    Raises:
        Error: The function does that.
    """
    if name in _LEAVES_TORCH:
        raise Error(
            f"The step of the optimizer calls Tensor.{name}{user_line(' at ')}: it is traced with "
            "tensors without values, and runs on the device. Compute with functions of torch."
        )


def called(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch; an error says which one it is, and where.

    Raises:
        Error: The function fails.
    """
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        text = str(_eager_error(func, args, kwargs) or error)
        raise Error(
            f"The step of the optimizer fails in the call of "
            f"{getattr(func, '__name__', func)}{user_line(' at ')}: {text}"
        ) from None


def _eager_error(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Exception | None:
    """Return the error of the same call with tensors that are full of zeros."""
    with host_computation():
        try:
            values = tree_map_only(
                torch.Tensor,
                lambda one: torch.zeros(one.shape, dtype=one.dtype),
                (list(args), kwargs),
            )
            func(*values[0], **values[1])
        except Exception as error:
            return error.with_traceback(None)
    return None
