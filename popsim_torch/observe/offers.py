"""The values that a model offers to a queue: their keys, shapes and sizes in bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import isroutine
from typing import Any

import torch
from torch import nn

from popsim_torch.dtypes import dtype_name, returned_dtype
from popsim_torch.errors import UsageTypeError
from popsim_torch.feeds.structure import as_tensor, flatten
from popsim_torch.private_torch.fake import FakeTensor, FakeTensorMode
from popsim_torch.private_torch.modes import DisableTorchFunction, TorchDispatchMode
from popsim_torch.private_torch.trees import tree_map_only
from popsim_torch.tables import table, terminal_width

__all__ = ["Offer", "call_on_shapes", "offers_text"]


@dataclass(frozen=True)
class Offer:
    """A value that a model offers to a queue in every step.

    Attributes:
        key: The key of the value.
        shapes: The shapes of its tensors for one micro-batch.
        dtypes: The dtypes of the returned tensors.
        taken: Whether the filters accept the key.
    """

    key: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    taken: bool

    @classmethod
    def of(cls, key: str, value: Any, taken: bool) -> Offer:
        """Describe a value: a tensor, or a nest of tensors and numbers.

        Raises:
            UsageTypeError: The value is something else.
        """
        where = f"MaybeOutfeedQueue.maybe_outfeed: the value of {key!r}"
        with DisableTorchFunction():
            tensors = [as_tensor(leaf, where) for leaf in flatten(value, where)[1]]
        return cls(
            key,
            tuple(tuple(tensor.shape) for tensor in tensors),
            tuple(returned_dtype(tensor.dtype) for tensor in tensors),
            taken,
        )

    @property
    def bytes(self) -> int:
        """The memory for the value in one element of the queue."""
        return sum(
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )


class _OnShapes(TorchDispatchMode):
    """Computes only shapes and dtypes; a change in place affects a stand-in of the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        def stand_in(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)

        args, kwargs = tree_map_only(torch.Tensor, stand_in, (args, kwargs or {}))
        with self._fake:
            return func(*args, **kwargs)


def call_on_shapes(model: Any, args: Any, kwargs: Any) -> None:
    """Call a module or function on tensors without memory; no tensor changes.

    Raises:
        UsageTypeError: ``model`` is neither.
    """
    if not isinstance(model, nn.Module) and not isroutine(model):
        raise UsageTypeError(
            "MaybeOutfeedQueue.dry_run: needs a module or a function, got a "
            f"{type(model).__name__}. For the result of trainingModel, pass its attribute model."
        )
    with torch.no_grad(), _OnShapes():
        model(*args, **kwargs)


def offers_text(offers: Sequence[Offer]) -> str:
    """Return a table of the offered values, which are observed, and their size in bytes."""
    rows = [("Key", "Shape", "Type", "Bytes", "Observed")]
    for offer in offers:
        shapes = " ".join(map(str, offer.shapes))
        types = " ".join(map(dtype_name, offer.dtypes))
        rows.append((offer.key, shapes, types, str(offer.bytes), "yes" if offer.taken else "no"))
    widths = [max(map(len, column)) + 1 for column in zip(*rows, strict=True)]
    lines = table(rows[0], rows[1:], widths, width=terminal_width()).splitlines()
    taken = [offer for offer in offers if offer.taken]
    total = sum(offer.bytes for offer in taken)
    lines.append(f"{len(taken)} of {len(offers)} keys are observed, {total} bytes per step.")
    return "\n".join(line.rstrip() for line in lines)
