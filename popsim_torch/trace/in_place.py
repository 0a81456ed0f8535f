"""Changes in place that need more than their operator: masks, and memory that overlaps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from popsim_torch.errors import Error
from popsim_torch.private_torch.tensors import storage_key
from popsim_torch.private_torch.trees import tree_leaves
from popsim_torch.trace.eager_errors import error_on_host
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.trace.graph.repeated_writes import repeated_dimensions
from popsim_torch.trace.graph.traced_tensors import in_transform, is_traced

__all__ = ["changed_tensor", "check_memory", "is_in_place", "is_mask", "masked_write"]

_RESIZES = frozenset({"resize_", "resize_as_"})
_WRITES = frozenset({"__setitem__", "index_put_", "index_put"})


class Values(Protocol):
    """Knows values during the trace."""

    def known_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a host tensor with the values of a tensor; None if they are not known."""


def is_in_place(name: str) -> bool:
    """Return whether a function of this name changes its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NO_CHANGES)
    return name.partition(".")[0].endswith("_")  # (an operator: "add_.Tensor")


def changed_tensor(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the tensor, or the tensors, that a function of this name changes; None if none."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    if not is_in_place(name):
        return None
    return args[0] if args else kwargs.get("input", kwargs.get("tensor"))


_NO_CHANGES = frozenset({"__index__", "__int__", "__invert__", "__iter__"})


# Overlap.


def check_memory(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise the error of eager PyTorch for a change of memory that it refuses.

    Traced tensors have no memory, so PyTorch does not look for elements that overlap, and
    ``resize_`` cannot take elements in the order of the memory.

    Args:
        func: A function of torch.
        name: Its name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        Error: The call resizes a tensor that is not contiguous.
    """
    if name in _RESIZES and args and is_traced(args[0]):
        _check_resize(name, args[0], args[1:])
    target = changed_tensor(name, args, kwargs)
    if not is_traced(target) or in_transform():
        return
    others = [one for one in tree_leaves((args, kwargs)) if one is not target and is_traced(one)]
    memory = storage_key(target)
    shares = any(storage_key(one) == memory and not _is_same(one, target) for one in others)
    if shares or repeated_dimensions(target):
        error = error_on_host(func, args, kwargs, same_memory=True)
        if error is not None:
            raise error


def _check_resize(name: str, x: torch.Tensor, sizes: tuple[Any, ...]) -> None:
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        sizes = tuple(getattr(sizes[0], "shape", sizes[0]))
    if x.is_contiguous() or tuple(x.shape) == sizes:
        return
    raise Error(
        f"{name}{user_line(' at ')}: a tensor of shape {tuple(x.shape)} that is not contiguous "
        "cannot be resized, because this depends on the order of its elements in memory. Use "
        "reshape() and slices, or resize x.contiguous()."
    )


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    layouts = ((t.shape, t.stride(), t.storage_offset()) for t in (one, other))
    return next(layouts) == next(layouts)


# Masks.


def masked_write(
    values: Values,
    func: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Callable[[], Any] | None:
    """Return a replacement for a write at the elements of a mask; None for other calls.

    The gradient of what is written has as many elements as the mask. So a mask of known values
    becomes positions, and for any other mask a value for all elements is written by ``where``.

    Args:
        values: Knows the values of masks.
        func: A function of torch.
        name: Its name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if name not in _WRITES or kwargs or len(args) < 3 or in_transform():
        return None
    target, index, value, *others = args
    if not is_traced(value) or not value.requires_grad or not torch.is_grad_enabled():
        return None
    parts = list(index) if isinstance(index, (tuple, list)) else [index]
    if not any(map(is_mask, parts)):
        return None
    known = [values.known_value(part) if is_mask(part) else part for part in parts]
    if all(part is not None or parts[i] is None for i, part in enumerate(known)):
        return functools.partial(func, target, _positions(known), value, *others)
    if len(parts) != 1 or any(others):
        return None
    mask = parts[0]
    inner = target.dim() - mask.dim()
    if value.dim() == inner + 1 and value.shape[0] == 1:
        value = value.squeeze(0)
    if value.dim() > inner and value.numel() == 1:
        value = value.reshape(())
    if mask.shape != target.shape[: mask.dim()] or value.dim() > inner:
        return None
    return functools.partial(_write_where, target, mask, value, name)


def is_mask(index: Any) -> bool:
    """Return whether an index takes the elements of a mask."""
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _positions(parts: list[Any]) -> tuple[Any, ...]:
    """Return an index with the positions of the elements of its masks."""
    result: list[Any] = []
    for part in parts:
        result += part.nonzero(as_tuple=True) if is_mask(part) else [part]
    return tuple(result)


def _write_where(
    target: torch.Tensor, mask: torch.Tensor, value: torch.Tensor, name: str
) -> torch.Tensor | None:
    shape = (*mask.shape, *(1,) * (target.dim() - mask.dim()))
    written = torch.where(mask.bool().reshape(shape), value.to(target.dtype), target)
    if name == "index_put":
        return written
    target.copy_(written)
    return None if name == "__setitem__" else target
