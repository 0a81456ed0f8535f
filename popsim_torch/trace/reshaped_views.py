"""Refuses changes in place of values after a view of them has changed its shape in place.

PyTorch's gradient of a changed view makes the view again from its base, for tensors without values
by the calls that made it: a change of its shape in place is none of them.
"""

from __future__ import annotations

from typing import Any

import torch

from popsim_torch.errors import Error
from popsim_torch.private_torch.tensors import base_of, storage_key
from popsim_torch.private_torch.trees import tree_leaves
from popsim_torch.trace.graph.kept_shapes import CHANGES_SHAPE
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.trace.graph.traced_tensors import is_traced, traced_tensors
from popsim_torch.trace.in_place import changed_tensor

__all__ = ["ReshapedViews"]


class ReshapedViews:
    """Knows which memory has views that were made before a change of shape in place."""

    def __init__(self) -> None:
        # By the key of the memory: a tensor that keeps it, the function, and the line of the user.
        self._reshaped: dict[int, tuple[torch.Tensor, str, str]] = {}

    def check(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a change of shape, and refuse a change of values that must not follow it.

        Args:
            name: The name of a function of torch.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Raises:
            Error: The call changes such memory, and gradients are recorded.
        """
        if name in CHANGES_SHAPE:
            if args and is_traced(args[0]) and torch.is_grad_enabled() and _has_views(args[0]):
                self._reshaped[storage_key(args[0])] = args[0], name, user_line(" at ")
            return
        target: Any = changed_tensor(name, args, kwargs) if self._reshaped else None
        if not is_traced(target) or not torch.is_grad_enabled():
            return
        if storage_key(target) not in self._reshaped:
            return
        _, change, line = self._reshaped[storage_key(target)]
        if any(map(_has_gradient, tree_leaves((args, kwargs)))):
            raise Error(
                f"'{name}'{user_line(' at ')} changes values in place, after '{change}'{line} has "
                "changed the shape of a view of them, or of what they are a view of. PyTorch "
                "cannot tell the gradient of that without values. Write x = x."
                f"{change.removesuffix('_')}(...) instead of x.{change}(...)."
            )


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _has_views(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a view, or there are views of it."""
    if base_of(tensor) is not None:
        return True
    return any(base_of(one) is tensor for one, _ in traced_tensors())
