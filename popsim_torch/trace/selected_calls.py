"""Calls of functions with elements at a mask that only a run knows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from popsim_torch.private_torch.modes import TorchDispatchMode
from popsim_torch.private_torch.tensors import storage_key
from popsim_torch.private_torch.trees import tree_leaves, tree_map_only
from popsim_torch.trace.books.known_values import TO_PYTHON
from popsim_torch.trace.in_place import is_in_place
from popsim_torch.trace.selected import Selected, SizesAtMask, is_usual
from popsim_torch.trace.selected_losses import LOSSES, loss_of, mean_of, sum_of
from popsim_torch.trace.selected_rows import by_row

__all__ = ["check_results", "selected_call"]

aten = torch.ops.aten
_HARMLESS = frozenset(
    {
        aten._to_copy.default,
        aten.alias.default,
        aten.clone.default,
        aten.detach.default,
        aten.lift_fresh.default,
        aten.lift_fresh_copy.default,
        aten.full_like.default,
        aten.ones_like.default,
        aten.zeros_like.default,
        torch.ops.prim.device.default,
    }
)
_READS = TO_PYTHON | {"__bool__", "__index__", "cpu", "numpy"}
_RESULTS_OF_ALL = {"sum": sum_of, "mean": mean_of}
_WRITES = frozenset({"__setitem__", "index_put", "index_put_"})


class _OnlyElementwise(TorchDispatchMode):
    """Notes the first operator that is not elementwise."""

    def __init__(self) -> None:
        super().__init__()
        self.other: Any = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator."""
        kwargs = kwargs or {}
        given = any(isinstance(one, torch.Tensor) for one in tree_leaves((args, kwargs)))
        fits = func in _HARMLESS or torch.Tag.pointwise in func.tags
        if given and (not fits or torch.Tag.nondeterministic_seeded in func.tags):
            self.other = self.other or func
        return func(*args, **kwargs)


def selected_call(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return a replacement for a call with elements at a mask; None if there are none.

    Raises:
        Error: The call needs to know how many there are.
    """
    first = None
    for one in (*args, *kwargs.values()):
        if type(one) is SizesAtMask:
            raise one.refused(name)
        if first is None and type(one) is Selected:
            first = one
    if first is None:
        return _joined_call(func, name, args, kwargs)
    if name in ("__get__", "__set__"):
        raise first.refused(getattr(func, "__self__", func).__name__)
    if name in _READS:
        raise first.refused(name)
    if name in _WRITES and type(args[2]) is Selected and len(args) == 3 and not kwargs:
        return functools.partial(_write, name, *args)
    if name in _RESULTS_OF_ALL and len(args) == 1 and not kwargs:
        return functools.partial(_RESULTS_OF_ALL[name], first)
    if name in LOSSES and func is getattr(F, name):
        return functools.partial(loss_of, first, func, name, args, kwargs)
    rowwise = by_row(first, func, name, args, kwargs)
    return rowwise or functools.partial(_elementwise, first, func, name, args, kwargs)


def _joined_call(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return a replacement for a call with a list of elements at a mask."""
    for one in (*args, *kwargs.values()):
        if type(one) is not list and type(one) is not tuple:
            continue
        first = next((item for item in one if type(item) is Selected), None)
        if first is not None:
            rowwise = by_row(first, func, name, args, kwargs)
            if rowwise is None:
                raise first.refused(name)
            return rowwise
    return None


def check_results(structure: Any) -> None:
    """Refuse elements at a mask that forward returns.

    Raises:
        Error: There are some.
    """
    for one in tree_leaves(structure):
        if type(one) is Selected:
            raise one.refused("return")


def _write(name: str, y: torch.Tensor, index: Any, value: Selected) -> Any:
    """Compute ``y[mask] = value``."""
    mask = index[0] if isinstance(index, (tuple, list)) and len(index) == 1 else index
    if not value.is_at(mask) or y.shape[: mask.dim()] != mask.shape:
        raise value.refused("y[mask] = ..., with another mask")
    if y.dim() - mask.dim() != value.full.dim() - 1:
        raise value.refused("y[mask] = ..., with other dimensions")
    full = value.full.reshape(*mask.shape, *value.full.shape[1:]).to(y.dtype).expand_as(y)
    result = torch.where(mask.reshape(*mask.shape, *(1,) * (value.full.dim() - 1)), full, y)
    if name == "index_put":
        return result
    y.copy_(result)
    return None if name == "__setitem__" else y


def _elementwise(
    first: Selected,
    func: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Selected:
    """Compute an elementwise function for all rows."""
    for one in tree_leaves((args, kwargs)):
        if type(one) is Selected and (not first.is_with(one) or one.full.dim() != first.full.dim()):
            raise first.refused(f"{name}, with elements at another mask,")
        if is_usual(one) and one.dim() >= first.full.dim():
            raise first.refused(f"{name}, with a tensor of shape {list(one.shape)},")
    changed = args[0] if is_in_place(name) and args else None
    if changed is not None and type(changed) is not Selected:
        raise first.refused(name)
    args, kwargs = tree_map_only(Selected, lambda one: one.full, (args, kwargs))
    with _OnlyElementwise() as mode:
        result = func(*args, **kwargs)
    if mode.other is not None or not isinstance(result, torch.Tensor):
        raise first.refused(name)
    if result.shape[:1] != first.rows.shape or result.dim() != first.full.dim():
        raise first.refused(name)
    if changed is not None:
        result.copy_(first.finite(result))
        return changed
    if result is first.full:
        return first
    shares = storage_key(result) == storage_key(first.full)  # (like detach(), or float())
    return first.like(result if shares else first.finite(result))
