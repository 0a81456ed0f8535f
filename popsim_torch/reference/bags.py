"""Bags of rows of a table: their sums, means and maxima."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from popsim_torch.reference.call import Call, op


def _sizes(offsets: Tensor, num_bags: int, num_indices: int) -> Tensor:
    """Return how many indices each bag has, with the padding."""
    ends = offsets[1 : num_bags + 1].tolist()
    ends += [num_indices] * (num_bags - len(ends))
    return torch.tensor(ends, dtype=torch.int64) - offsets[:num_bags].long()


def _bag_of(offsets: Tensor, num_bags: int, num_indices: int) -> Tensor:
    """Return the bag of each index; the number of bags if it belongs to none."""
    bags = torch.arange(num_bags).repeat_interleave(_sizes(offsets, num_bags, num_indices))
    return F.pad(bags, (0, num_indices - len(bags)), value=num_bags)


@op
def embedding_bag(
    call: Call, table: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sum, mean or maximum of the rows of each bag, and what its gradient needs."""
    mode, padding = call["mode"], call.get("padding_index", -1)
    has_last = call.get("include_last_offset", False)
    num_bags = len(offsets) - has_last
    rows = indices.long()
    bags = _bag_of(offsets, num_bags, len(rows))
    largest = torch.full((num_bags, table.shape[1]), -1)
    y = table.new_zeros(num_bags, table.shape[1])
    counts = torch.zeros(num_bags, dtype=torch.int64)
    for i, (row, bag) in enumerate(zip(rows.tolist(), bags.tolist(), strict=True)):
        if bag == num_bags or row == padding:
            continue
        value = table[row] if weights is None else table[row] * weights[i]
        if mode == "max":
            larger = (value > y[bag]) | (counts[bag] == 0)
            y[bag] = torch.where(larger, value, y[bag])
            largest[bag] = torch.where(larger, row, largest[bag])
        else:
            y[bag] += value
        counts[bag] += 1
    if mode == "mean":
        y = y / counts.clamp(min=1)[:, None]
    return y, bags, counts, largest if mode == "max" else torch.zeros_like(counts)


@op
def embedding_bag_grad(
    call: Call,
    gradient: Tensor,
    indices: Tensor,
    offsets: Tensor,
    largest: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the gradient of the table."""
    table = gradient.new_zeros(call["rows"], gradient.shape[1])
    if largest is not None:
        is_row = (largest >= 0) & (largest < call["rows"])
        given = torch.where(is_row, gradient, 0.0)
        return table.scatter_add(0, torch.where(is_row, largest, 0).long(), given)
    num_bags = len(gradient)
    bags = _bag_of(offsets, num_bags, len(indices))
    counts = (bags < num_bags) & (indices != call.get("padding_index", -1))
    parts = gradient[bags[counts]]
    if call["mode"] == "mean":
        sizes = torch.bincount(bags[counts], minlength=num_bags)
        parts = parts / sizes[bags[counts]][:, None]
    if weights is not None:
        parts = parts * weights[counts][:, None]
    return table.index_add(0, indices[counts].long(), parts)


@op
def embedding_bag_weights_grad(
    call: Call, gradient: Tensor, table: Tensor, indices: Tensor, offsets: Tensor
) -> Tensor:
    """Return the gradient of the weight of each index."""
    num_bags = len(gradient)
    bags = _bag_of(offsets, num_bags, len(indices))
    counts = (bags < num_bags) & (indices != call.get("padding_index", -1))
    products = (gradient[bags.clamp(max=num_bags - 1)] * table[indices.long()]).sum(1)
    return torch.where(counts, products, 0.0)
