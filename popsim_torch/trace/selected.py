"""Elements of a tensor at a mask that only a run knows: their number decides no shape.

``z[mask]`` is not computed: :class:`Selected` stands for it. Elementwise functions are computed
for all elements of ``z``, and ``y[mask] = f(z[mask])`` is ``torch.where(mask, f(z), y)``. Where the
mask is false, ``f`` gets the first element that is selected: so it makes no infinity or NaN there
that the selected elements do not have, and no gradient goes to ``z``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import handle_torch_function

from popsim_torch.errors import Error
from popsim_torch.private_torch.modes import TorchDispatchMode
from popsim_torch.private_torch.tensors import storage_key, version_of
from popsim_torch.private_torch.trees import tree_leaves, tree_map_only
from popsim_torch.trace.books.known_values import TO_PYTHON
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.trace.graph.traced_tensors import find_node, in_transform, is_traced
from popsim_torch.trace.host_data import HostData
from popsim_torch.trace.in_place import is_in_place

__all__ = ["Selected", "check_results", "selected_call", "selecting_call"]

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
_RESULTS_OF_ALL = {"sum": False, "mean": True}
_WRITES = frozenset({"__setitem__", "index_put", "index_put_"})


class Selected:
    """The elements of a tensor at a mask.

    Args:
        full: A tensor that has these elements at the mask, and others elsewhere.
        mask: The user's mask, of the first dimensions.
        line: The line of the user that selects them.
    """

    def __init__(self, full: torch.Tensor, mask: torch.Tensor, line: str) -> None:
        self.full = full
        self.mask = mask.clone()  # (the user may change it)
        self.line = line
        self._place = _place_of(mask)
        self._any = self.mask.any()

    def like(self, full: torch.Tensor) -> Selected:
        """Return the elements of another tensor at the same mask."""
        result = copy.copy(self)
        result.full = full
        return result

    def finite(self, full: torch.Tensor) -> torch.Tensor:
        """Return a tensor with ones if no element is selected: a gradient of zero stays zero."""
        return torch.where(self._any, full, torch.ones_like(full))

    def is_with(self, other: Selected) -> bool:
        """Return whether other elements are at the same mask."""
        return self._place == other._place

    def is_at(self, mask: Any) -> bool:
        """Return whether a mask is the one of the elements, without a change since."""
        return isinstance(mask, torch.Tensor) and _place_of(mask) == self._place

    def refused(self, name: str) -> Error:
        """Return the error for a call that needs to know how many elements there are."""
        return Error(
            f"The number of elements of z[mask]{self.line} depends on values of the device, which "
            f"do not exist while the model is traced, and '{name}'{user_line(' at ')} needs it. "
            "Elementwise functions, sum and mean of z[mask] work, and y[mask] = f(z[mask]) with "
            "the same tensor as mask. For others, keep the shape: instead of y[mask] = f(z[mask]), "
            "write y = torch.where(mask, f(z), y); instead of y[mask].max(), "
            "torch.where(mask, y, -torch.inf).max(); instead of F.mse_loss(y[mask], z[mask]), "
            "torch.where(mask, F.mse_loss(y, z, reduction='none'), 0).sum() / mask.sum()."
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse a call outside of the trace."""
        values = tree_leaves((args, kwargs))
        raise next(one for one in values if type(one) is cls).refused(func.__name__)

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device", "requires_grad", "is_cuda", "layout"):
            return getattr(self.full, name)
        if name == "ndim":
            return self.dim()
        method = getattr(torch.Tensor, name, None)
        if method is None or name.startswith("__"):
            raise AttributeError(f"'Tensor' object has no attribute '{name}'")
        if not callable(method):
            raise self.refused(name)
        return functools.partial(handle_torch_function, method, (self,), self)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.full.dim() - self.mask.dim() + 1

    def __repr__(self) -> str:
        return f"<elements at a mask of the device, {self.dtype}{self.line}>"

    __hash__ = object.__hash__


def _method(name: str) -> Callable[..., Any]:
    function = getattr(torch.Tensor, name)

    def call(self: Selected, *others: Any) -> Any:
        return handle_torch_function(function, (self,), self, *others)

    return call


_OPERATORS = "add sub mul truediv floordiv mod pow and or xor"
for _name in (
    *(f"__{name}__" for name in _OPERATORS.split()),
    *(f"__r{name}__" for name in _OPERATORS.split()),
    *(f"__i{name}__" for name in _OPERATORS.split()),
    *("__neg__", "__abs__", "__invert__", "__lt__", "__le__", "__gt__", "__ge__", "__eq__"),
    *("__ne__", "__getitem__", "__setitem__", "__len__", "__iter__", "__bool__", "__float__"),
    *("__int__", "__matmul__", "__rmatmul__"),
):
    setattr(Selected, _name, _method(_name))


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


def selecting_call(
    values: HostData, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return a replacement for ``z[mask]`` if only a run knows the mask; else None."""
    if name not in ("__getitem__", "masked_select") or len(args) != 2 or kwargs or in_transform():
        return None
    z, mask = args
    if isinstance(mask, tuple) and len(mask) == 1:
        (mask,) = mask
    if not (is_traced(z) and isinstance(mask, torch.Tensor) and mask.dtype == torch.bool):
        return None
    if not mask.dim() or mask.shape != z.shape[: mask.dim()] or not z.numel():
        return None
    if name == "masked_select" and mask.dim() != z.dim():
        return None
    if values.known_value(mask) is not None:
        return None
    return functools.partial(_select, z, mask, user_line(" at "))


def _place_of(mask: torch.Tensor) -> tuple[Any, ...]:
    """Return what two masks have in common only if they have the same values."""
    version = None if mask.is_inference() else version_of(mask)
    return find_node(mask), mask.shape, mask.stride(), mask.storage_offset(), version


def _over(mask: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a mask of the first dimensions of a tensor with as many dimensions."""
    return mask.reshape(*mask.shape, *(1,) * (tensor.dim() - mask.dim()))


def _select(z: torch.Tensor, mask: torch.Tensor, line: str) -> Selected:
    with torch.no_grad():
        first = mask.flatten().to(torch.int32).argmax()
        usual = z.detach().flatten(0, mask.dim() - 1).index_select(0, first.reshape(1)).squeeze(0)
    selected = Selected(z, mask, line)
    return selected.like(selected.finite(torch.where(_over(mask, z), z, usual)))


def selected_call(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return a replacement for a call with elements at a mask; None if there are none.

    Raises:
        Error: The call needs to know how many there are.
    """
    first = next((one for one in (*args, *kwargs.values()) if type(one) is Selected), None)
    if first is None:
        for one in (*args, *kwargs.values()):
            if type(one) is list or type(one) is tuple:
                for item in one:
                    if type(item) is Selected:
                        raise item.refused(name)
        return None
    if name in _READS:
        raise first.refused(name)
    if name in _WRITES and type(args[2]) is Selected and len(args) == 3 and not kwargs:
        return functools.partial(_write, name, *args)
    if name in _RESULTS_OF_ALL and len(args) == 1 and not kwargs:
        return functools.partial(_of_all, first, mean=_RESULTS_OF_ALL[name])
    return functools.partial(_elementwise, first, func, name, args, kwargs)


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
    if y.dim() != value.full.dim():
        raise value.refused("y[mask] = ..., with other dimensions")
    result = torch.where(_over(mask, y), value.full.to(y.dtype).expand_as(y), y)
    if name == "index_put":
        return result
    y.copy_(result)
    return None if name == "__setitem__" else y


def _of_all(of: Selected, *, mean: bool) -> torch.Tensor:
    """Return the sum or the mean of all elements."""
    if mean and not (of.full.is_floating_point() or of.full.is_complex()):
        raise RuntimeError(
            "mean(): could not infer output dtype. Input dtype must be either a floating point or "
            f"complex dtype. Got: {str(of.dtype).removeprefix('torch.')}"
        )
    mask = _over(of.mask, of.full)
    total = torch.where(mask, of.full, torch.zeros_like(of.full)).sum()
    if not mean:
        return total
    return (total / (mask.sum() * (of.full.numel() // mask.numel()))).to(of.dtype)


def _elementwise(
    first: Selected,
    func: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Selected:
    """Compute an elementwise function for all elements."""
    inner = first.full.dim() - first.mask.dim()
    for one in tree_leaves((args, kwargs)):
        if type(one) is Selected and (not first.is_with(one) or one.full.dim() != first.full.dim()):
            raise first.refused(f"{name}, with elements at another mask,")
        if isinstance(one, torch.Tensor) and one.dim() > inner:
            raise first.refused(f"{name}, with a tensor of shape {list(one.shape)},")
    changed = args[0] if is_in_place(name) and args else None
    if changed is not None and type(changed) is not Selected:
        raise first.refused(name)
    args, kwargs = tree_map_only(Selected, lambda one: one.full, (args, kwargs))
    with _OnlyElementwise() as mode:
        result = func(*args, **kwargs)
    if mode.other is not None or not isinstance(result, torch.Tensor):
        raise first.refused(name)
    if result.shape[: first.mask.dim()] != first.mask.shape or result.dim() != first.full.dim():
        raise first.refused(name)
    if changed is not None:
        result.copy_(first.finite(result))
        return changed
    if result is first.full:
        return first
    shares = storage_key(result) == storage_key(first.full)  # (like detach(), or float())
    return first.like(result if shares else first.finite(result))
