"""Slices whose start is a tensor, which may change from run to run."""

from __future__ import annotations

from typing import Any

import torch

from popsim_torch.dtypes import returned_dtype
from popsim_torch.errors import Error
from popsim_torch.ops import op_listener

__all__ = ["as_index", "dynamic_slice", "dynamic_update", "slice_of_run"]

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_INDICES = (torch.int32, torch.int64)


def dynamic_slice(
    tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int
) -> torch.Tensor:
    """Return a slice of a tensor along a dimension, which begins at the value of ``start``.

    Each run uses the current value. Positions wrap around: after the end the slice continues at the
    beginning, and a negative start counts from the end. The slice has a gradient. Outside of a
    traced model it is an ordinary PyTorch slice, which stops at the end of the dimension.

    Args:
        tensor: Any shape and dtype.
        dim: The dimension; negative ones count from the last.
        start: The first position: one integer of any width, computed in the run or constant.
        size: The number of positions in the range of the slice; must divide the length of the
            dimension.
        step: Every ``step``-th position in the range is kept, starting with the first.

    Returns:
        A tensor like ``tensor``, with ``ceil(size / step)`` positions along ``dim``.

    Raises:
        Error: An argument has a wrong type; or, while a model is compiled, the slice does not
            exist.
    """
    what = "dynamic_slice"
    _check_arguments(what, tensor, start, dim=dim, size=size, step=step)
    if op_listener.get() is None:
        return tensor[_index(tensor, dim, start, size, step)]
    length = _check_size(what, tensor, dim, size)
    if step < 1:
        raise Error(f"{what}: step is {step}; it must be at least 1.")
    if length % size:
        raise Error(
            f"{what}: the size of the slice ({size}) must be a factor of the slicing dimension "
            f"(dimension {dim} has {length} positions). Slice it by another size, or pad it."
        )
    return slice_of_run(tensor, dim, start, size, step)


def slice_of_run(
    tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int, *, wraps: bool = True
) -> torch.Tensor:
    """Return the result of :func:`dynamic_slice` in a traced model, for any size up to the length.

    Args:
        tensor: As for :func:`dynamic_slice`.
        dim: As for :func:`dynamic_slice`.
        start: As for :func:`dynamic_slice`.
        size: From 1 to the length of the dimension.
        step: As for :func:`dynamic_slice`.
        wraps: Whether positions wrap around. If not, the size is 1, and a run fails if ``start`` is
            not a position of the dimension.

    Raises:
        Error: The slice does not exist.
    """
    length = _check_size("A slice that begins where a tensor says", tensor, dim, size)
    if size > length or step < 1:
        raise Error(
            f"A slice of {size} positions, every {step}. of them, along dimension {dim}, which has "
            f"{length}: its size may be from 1 to {length}, its step from 1 on."
        )
    result: torch.Tensor = torch.ops.popsim.dynamic_slice(
        tensor, as_index(start), dim % tensor.dim(), -(-size // step), step, wraps
    )
    return result


def dynamic_update(
    input: torch.Tensor, src: torch.Tensor, dim: int, start: torch.Tensor, size: int
) -> torch.Tensor:
    """Return a copy of a tensor in which a slice is replaced, from the position ``start`` on.

    Positions wrap around as in :func:`dynamic_slice`. The function has gradients. Outside of a
    traced model it is ``torch.slice_scatter``.

    Args:
        input: Any shape and dtype.
        src: The new values of the slice: with the shape of ``input`` except along ``dim``, and its
            dtype.
        dim: The dimension; negative ones count from the last.
        start: The first position: one integer of any width, computed in the run or constant.
        size: The number of positions to replace: the length of ``src`` along ``dim``.

    Returns:
        A tensor like ``input``.

    Raises:
        Error: An argument has a wrong type, or the two tensors differ in rank or dtype; or, while a
            model is compiled, the slice does not exist.
    """
    what = "dynamic_update"
    _check_arguments(what, input, start, dim=dim, size=size)
    _check_tensor(what, "src", src)
    if input.dim() != src.dim():
        raise Error(
            f"{what}: input and src must have same dimensionality: input has {input.dim()} "
            f"dimensions, src has {src.dim()}."
        )
    traced = op_listener.get() is not None
    of_input, of_src = (returned_dtype(t.dtype) if traced else t.dtype for t in (input, src))
    if of_input != of_src:
        raise Error(
            f"{what}: input and src must have same dtype: input is {of_input}, src is {of_src}. "
            "Convert one of them."
        )
    if not traced:
        first = _index(input, dim, start, size, 1)[dim % input.dim()]
        return torch.slice_scatter(input, src, dim, first.start, first.stop)
    _check_size(what, input, dim, size)
    dim %= input.dim()
    part = list(input.shape)
    part[dim] = size
    if list(src.shape) != part or size > input.shape[dim]:
        raise Error(
            f"{what}: src has shape {tuple(src.shape)}, and {size} positions of dimension {dim} of "
            f"an input of shape {tuple(input.shape)} are replaced: src must have shape "
            f"{tuple(part)}, and size may be from 1 to {input.shape[dim]}."
        )
    position = as_index(start)
    result: torch.Tensor = torch.ops.popsim.dynamic_update(input, src, position, dim, 1, True)
    return result


def _check_tensor(what: str, name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise Error(f"{what}: {name} must be a torch.Tensor, got {type(value).__name__}.")


def _check_arguments(what: str, tensor: object, start: object, **numbers: object) -> None:
    """Check the types of the arguments."""
    _check_tensor(what, "the tensor", tensor)
    _check_tensor(what, "start", start)
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool):
            raise Error(f"{what}: {name} must be an int, got {type(number).__name__}.")
    assert isinstance(tensor, torch.Tensor) and isinstance(start, torch.Tensor)  # (checked above)
    if start.dtype not in _INTEGERS:
        raise Error(f"{what}: start must be an integer tensor, got {start.dtype}.")
    if start.numel() != 1:
        raise Error(f"{what}: start must be one number, got shape {tuple(start.shape)}.")
    dim, rank = numbers["dim"], tensor.dim()
    if not -rank <= dim < rank:  # type: ignore[operator]
        raise Error(
            f"{what}: there is no dimension {dim} in a tensor of shape {tuple(tensor.shape)}."
        )


def _check_size(what: str, tensor: torch.Tensor, dim: int, size: int) -> int:
    """Return the length of a dimension, and check that the slice is not empty."""
    if size == 0:
        raise Error(f"{what}: size is 0: the start and end of a slice must be different.")
    if size < 0:
        raise Error(f"{what}: size is {size}: the slice has an end less than the start.")
    return int(tensor.shape[dim])


def as_index(start: torch.Tensor) -> torch.Tensor:
    """Return a number in a dtype that the device's ops accept as a position."""
    return start if start.dtype in _INDICES else start.to(torch.int32)


def _index(
    tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int
) -> tuple[Any, ...]:
    """Return the index of a slice for PyTorch, which stops at the end of the dimension."""
    first = int(start)
    axis = dim % tensor.dim()
    if first < 0:
        first += tensor.shape[axis]
    whole = [slice(None)] * axis
    return (*whole, slice(first, first + size, step))
