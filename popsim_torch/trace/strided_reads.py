"""Refuses changes of memory that ``as_strided`` of a view shows beside that view.

PyTorch's gradient for the elements beside the view depends on when something changes in place, and
is another one for tensors without values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from popsim_torch.errors import Error
from popsim_torch.private_torch.tensors import base_of, storage_key
from popsim_torch.private_torch.trees import tree_leaves
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.trace.graph.traced_tensors import is_traced
from popsim_torch.trace.in_place import is_in_place

__all__ = ["StridedReads"]

_AS_STRIDED = frozenset({torch.as_strided, torch.Tensor.as_strided})


class StridedReads:
    """Knows which memory ``as_strided`` has shown beside the view that it was called of."""

    def __init__(self) -> None:
        # By the key of the memory: a tensor that keeps it, and the line of the user.
        self._shown: dict[int, tuple[torch.Tensor, str]] = {}

    def check(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Note a call of ``as_strided``, and refuse a change in place that must not follow it.

        Raises:
            Error: The call changes such memory, and gradients are recorded.
        """
        if not args or not is_traced(args[0]):
            return
        if func in _AS_STRIDED and base_of(args[0]) is not None:
            if _is_beside(*args, **kwargs):
                self._shown[storage_key(args[0])] = args[0], user_line(" at ")
        elif self._shown and is_in_place(name) and torch.is_grad_enabled():
            _, line = self._shown.get(storage_key(args[0]), (None, None))
            if line is not None and any(map(_has_gradient, tree_leaves((args, kwargs)))):
                raise Error(
                    f"'{name}'{user_line(' at ')} changes a tensor in place that as_strided{line} "
                    "shows, beside the view that it was called of. PyTorch's gradient of that "
                    "depends on the order of changes. Call as_strided of the tensor that the view "
                    "belongs to, or of a copy: view.clone()."
                )


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _is_beside(view: torch.Tensor, size: Any, stride: Any, storage_offset: Any = None) -> bool:
    """Return whether ``view.as_strided(...)`` shows memory before or behind the view."""
    offset = view.storage_offset()
    first = offset if storage_offset is None else storage_offset
    return bool(
        first < offset or _end(first, size, stride) > _end(offset, view.shape, view.stride())
    )


def _end(first: Any, size: Any, stride: Any) -> int:
    return int(first + sum((n - 1) * step for n, step in zip(size, stride, strict=True)))
