"""Elements of a tensor at a mask that only a run knows: their number decides no shape.

``z[mask]`` is not computed: :class:`Selected` stands for it. Functions of each row are computed
for all rows of ``z``. ``y[mask] = f(z[mask])`` is ``torch.where(mask, f(z), y)``; sums, means and
losses leave out the rows where the mask is false. There, ``f`` gets the first row that is selected:
so it makes no infinity or NaN that the selected rows do not have, and no gradient goes to ``z``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.overrides import handle_torch_function

from popsim_torch.errors import Error
from popsim_torch.private_torch.modes import DisableTorchFunction
from popsim_torch.private_torch.tensors import version_of
from popsim_torch.private_torch.trees import tree_leaves
from popsim_torch.trace.graph.origin import is_user_code, user_line
from popsim_torch.trace.graph.same_values import have_same_value
from popsim_torch.trace.graph.traced_tensors import (
    find_node,
    host_computation,
    in_transform,
    is_traced,
)
from popsim_torch.trace.host_data import HostData

__all__ = ["Selected", "SizesAtMask", "check_sizes", "is_usual", "selecting_call"]


class Selected(torch.Tensor):
    """The elements of a tensor at a mask: rows of which only a run knows how many there are.

    It is a tensor because programs ask for that, and PyTorch takes what passes for one as one. The
    tensor is empty; code of PyTorch that does not ask the mode of the trace gets an error.

    Args:
        full: A tensor with one row for each element of the mask, the selected rows among them.
        mask: The user's mask, of the first dimensions of the tensor that it selects from.
        line: The line of the user that selects them.

    Attributes:
        rows: The mask, with one dimension.
    """

    full: torch.Tensor

    def __new__(cls, *_: Any) -> Selected:
        """Make the empty tensor."""
        with host_computation(), DisableTorchFunction():
            return torch.empty(0, device="meta").as_subclass(cls)

    def __init__(self, full: torch.Tensor, mask: torch.Tensor, line: str) -> None:
        self.full = full
        self.mask = mask.clone()  # (the user may change it)
        self.rows = self.mask.flatten()
        self.line = line
        self._place = _Place(mask)
        self._any = self.mask.any()

    def like(self, full: torch.Tensor) -> Selected:
        """Return the rows of another tensor at the same mask."""
        result = Selected.__new__(Selected)
        result.__dict__.update(self.__dict__, full=full)
        return result

    def finite(self, full: torch.Tensor) -> torch.Tensor:
        """Return other rows if none is selected, with which a gradient of zero stays zero.

        Their numbers differ, and are between 0.5 and 0.75: usual functions are smooth there.
        """
        usual = torch.ones_like(full)
        inner = full.shape[1:]
        if full.is_floating_point():
            steps = torch.arange(inner.numel(), dtype=full.dtype, device=full.device)
            usual = usual * (0.5 + 0.25 / max(inner.numel(), 1) * steps).reshape(inner)
        return torch.where(self._any, full, usual)

    def over(self, full: torch.Tensor) -> torch.Tensor:
        """Return the mask with as many dimensions as a tensor of all rows."""
        return self.rows.reshape(-1, *(1,) * (full.dim() - 1))

    def is_with(self, other: Selected) -> bool:
        """Return whether other rows are at the same mask."""
        return self._place.is_that_of(other._place)

    def is_at(self, mask: Any) -> bool:
        """Return whether a mask is the one of the rows, without a change since."""
        return is_usual(mask) and self._place.is_that_of(_Place(mask))

    def refused(self, name: str) -> Error:
        """Return the error for a call that needs to know how many rows there are."""
        return _refused(name, user_line(" at "), self.line)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse a call outside of the trace."""
        values = tree_leaves((args, kwargs))
        raise next(one for one in values if type(one) is cls).refused(func.__name__)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse a call inside of PyTorch."""
        return cls.__torch_function__(func, types, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"'Tensor' object has no attribute '{name}'")

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.full.dim()

    def size(self, dim: int | None = None) -> Any:
        """Return the size of a dimension of the rows, or of all dimensions.

        Raises:
            Error: It is the number of rows.
        """
        sizes = SizesAtMask(self)
        return sizes if dim is None else sizes[dim]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<elements at a mask of the device, {self.dtype}{self.line}>"

    __str__ = __repr__
    __hash__ = object.__hash__

    def __format__(self, spec: str) -> str:
        return repr(self)


def is_usual(value: Any) -> bool:
    """Return whether a value is a tensor, and none of elements at a mask."""
    return isinstance(value, torch.Tensor) and type(value) is not Selected


class SizesAtMask(Sequence[int]):
    """The shape of elements at a mask, whose first size nobody knows."""

    def __init__(self, of: Selected) -> None:
        self._of = of
        self._inner = of.full.shape[1:]

    def __len__(self) -> int:
        return 1 + len(self._inner)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            found = range(len(self))[index]
            if 0 in found:
                raise self.refused("shape")
            return torch.Size(self._inner[one - 1] for one in found)
        position = range(len(self))[index]
        return self._inner[position - 1] if position else self._refuse()

    def refused(self, name: str) -> Error:
        """Return the error for a call that needs to know the first size."""
        return self._of.refused(name)

    def _refuse(self, *_: Any) -> NoReturn:
        raise self.refused("shape")

    __iter__ = __eq__ = __str__ = __repr__ = _refuse
    __hash__ = object.__hash__

    def numel(self) -> int:
        """Refuse to tell the number of elements."""
        self._refuse()


def _refused(name: str, at: str, selected_at: str = "") -> Error:
    return Error(
        f"The number of elements of z[mask]{selected_at} depends on values of the device, which "
        f"do not exist while the model is traced, and '{name}'{at} needs it. "
        "Elementwise functions, sums, means and losses of z[mask] work, functions of each row "
        "(linear, softmax(-1)), and y[mask] = f(z[mask]), all with the same mask. For others, "
        "keep the shape: instead of y[mask] = f(z[mask]), write "
        "y = torch.where(mask, f(z), y); instead of y[mask].max(), "
        "torch.where(mask, y, -torch.inf).max()."
    )


def check_sizes(error: Exception) -> None:
    """Refuse a call that PyTorch has refused because the number of rows is among its arguments.

    Args:
        error: The exception of forward.

    Raises:
        Error: It is such a call, ``torch.ones(z[mask].shape)``.
    """
    text = str(error)
    if isinstance(error, (TypeError, ValueError)) and SizesAtMask.__name__ in text:
        function = re.match(r"\w+(?=\(\))", text)
        raise _refused(function[0] if function else "shape", _line_of(error)) from error


def _line_of(error: Exception) -> str:
    """Return the innermost line of the user in a traceback."""
    line, entry = "", error.__traceback__
    while entry is not None:
        if is_user_code(entry.tb_frame):
            line = f" at {entry.tb_frame.f_code.co_filename}:{entry.tb_lineno}"
        entry = entry.tb_next
    return line


def _method(name: str) -> Callable[..., Any]:
    function = getattr(torch.Tensor, name)

    def call(self: Selected, *others: Any) -> Any:
        return handle_torch_function(function, (self,), self, *others)

    return call


def _of_rows(name: str) -> property:
    """Return an attribute that is the one of all rows; it cannot be set."""

    def refuse(self: Selected, _: Any) -> NoReturn:
        raise self.refused(name)

    return property(lambda self: getattr(self.full, name), refuse)


for _name in ("dtype", "device", "is_cuda", "layout", "ndim", "requires_grad"):
    setattr(Selected, _name, _of_rows(_name))
Selected.shape = property(Selected.size)  # type: ignore[assignment]

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


class _Place:
    """What two masks have in common only if they have the same values."""

    def __init__(self, mask: torch.Tensor) -> None:
        self._node = find_node(mask)
        self._shape = mask.shape
        self._num_changes = None if mask.is_inference() else version_of(mask)
        self._layout = mask.stride(), mask.storage_offset()

    def is_that_of(self, other: _Place) -> bool:
        """Return whether another mask has the same values."""
        if self._shape != other._shape or self._num_changes != other._num_changes:
            return False
        if self._node is other._node:
            return self._layout == other._layout
        if self._node is None or other._node is None or self._num_changes:
            return False
        return have_same_value(self._node, other._node)


def selecting_call(
    values: HostData, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return a replacement for ``z[mask]`` if only a run knows the mask; else None."""
    if name not in ("__getitem__", "masked_select") or len(args) != 2 or kwargs or in_transform():
        return None
    z, mask = args
    if isinstance(mask, tuple) and len(mask) == 1:
        (mask,) = mask
    if not (is_traced(z) and is_usual(mask) and mask.dtype == torch.bool):
        return None
    if not mask.dim() or mask.shape != z.shape[: mask.dim()] or not z.numel():
        return None
    if name == "masked_select" and mask.dim() != z.dim():
        return None
    if values.known_value(mask) is not None:
        return None
    return functools.partial(_select, z, mask, user_line(" at "))


def _select(z: torch.Tensor, mask: torch.Tensor, line: str) -> Selected:
    full = z.flatten(0, mask.dim() - 1)
    selected = Selected(full, mask, line)
    with torch.no_grad():
        first = selected.rows.to(torch.int32).argmax()
        usual = full.detach().index_select(0, first.reshape(1)).squeeze(0)
    return selected.like(selected.finite(torch.where(selected.over(full), full, usual)))
