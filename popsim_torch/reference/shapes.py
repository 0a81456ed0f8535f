"""Ops that move numbers and compute nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from popsim_torch.reference.call import Call, op


@op
def cat(call: Call, *tensors: Tensor) -> Tensor:
    """Concatenate the tensors along an axis."""
    return torch.cat(tensors, call["axis"])


@op
def into_zeros(call: Call, x: Tensor) -> Tensor:
    """Return zeros with the tensor written to some positions."""
    flat = x.new_zeros(math.prod(call["shape"]))
    flat.as_strided(x.shape, call["strides"], call["offset"]).copy_(x)
    return flat.reshape(call["shape"])


def _positions(call: Call, length: int, start: Tensor, count: int) -> Tensor:
    """Return positions on an axis; they wrap around its end."""
    step: int = call.get("step", 1)
    return (int(start) + step * torch.arange(count)) % length


@op
def dynamic_slice(call: Call, x: Tensor, start: Tensor) -> Tensor:
    """Return a part of a tensor along an axis; its first position is a value."""
    axis = call["axis"]
    return x.index_select(axis, _positions(call, x.shape[axis], start, call["count"]))


@op
def dynamic_update(call: Call, x: Tensor, part: Tensor, start: Tensor) -> Tensor:
    """Return a tensor with a part of it replaced."""
    axis = call["axis"]
    positions = _positions(call, x.shape[axis], start, part.shape[axis])
    return x.index_copy(axis, positions, part)


@op
def embedding(call: Call, table: Tensor, indices: Tensor) -> Tensor:
    """Return rows of a table."""
    return table[indices.long()]


@op
def embedding_grad(call: Call, gradient: Tensor, indices: Tensor) -> Tensor:
    """Return the table's gradient: the sum for each row, zero for the row of the padding."""
    rows, width = indices.reshape(-1).long(), gradient.shape[-1]
    counts = rows != call["padding_index"]
    table = gradient.new_zeros(call["rows"], width)
    return table.index_add(0, rows[counts], gradient.reshape(-1, width)[counts])
