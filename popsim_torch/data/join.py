"""Joins batches with the same structure into a longer batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from popsim_torch.arguments.structures import Node, TensorNode, describe
from popsim_torch.errors import Error, UsageTypeError

__all__ = ["join"]


def join(batches: Sequence[Any]) -> Any:
    """Return one batch whose tensors are joined from several batches in dimension 0.

    Args:
        batches: At least one batch; all must be the same containers of tensors.

    Raises:
        UsageTypeError: A batch contains something else than tensors, or their structures differ.
    """
    root = describe("batch", batches[0], _part)
    rows: list[list[torch.Tensor]] = []
    for batch in batches:
        rows.append([])
        try:
            root.collect(batch, rows[-1])
        except Error as error:
            raise UsageTypeError(
                "DataLoader: cannot join batches of different structures. With a batch_sampler, "
                "collate_fn must always return the same kinds of containers."
            ) from error
    return root.build(torch.cat(column) for column in zip(*rows, strict=True))


class _Part(TensorNode):
    """A tensor in a batch; it may be longer or shorter at the same place in other batches."""

    def collect(self, value: Any, tensors: list[torch.Tensor]) -> None:
        if not isinstance(value, torch.Tensor):
            raise self.changed("a tensor", f"a {type(value).__name__}")
        tensors.append(value)


def _part(name: str, value: Any) -> Node:
    if isinstance(value, torch.Tensor):
        return _Part(name, value)
    raise UsageTypeError(
        f"DataLoader: cannot join batches, as {name} is a {type(value).__name__}. With a "
        "batch_sampler, collate_fn must return tensors, in lists, tuples, dicts or types of "
        "registerCustomArgParser."
    )
