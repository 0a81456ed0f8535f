"""What a run says of each of its tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from popsim_torch.dtypes import dtype_name

__all__ = [
    "FURTHER_OUTPUT",
    "GRADIENT_OF_OUTPUT",
    "OUTPUT",
    "DescribedTensor",
    "RecordedTensor",
    "printable",
]

OUTPUT = "module output"
"""The kind of the first tensor that a module returned where PyTorch ran the model."""
FURTHER_OUTPUT = "further module output"
"""The kind of the other tensors that it returned."""
GRADIENT_OF_OUTPUT = "gradient of a module output"
"""The kind of the gradients of these."""

_NUM_FIELDS = 6


class DescribedTensor(Protocol):
    """What a ``RunWriter`` needs to know of a tensor."""

    @property
    def name(self) -> str:
        """The name."""

    @property
    def shape(self) -> Sequence[int] | None:
        """The shape of one micro-batch; None if it is unknown."""

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype; None if it is unknown."""

    @property
    def module(self) -> str:
        """The module that it belongs to."""

    @property
    def kind(self) -> str:
        """What it is."""

    @property
    def source(self) -> str:
        """The line of code that it comes from."""


@dataclass(frozen=True)
class RecordedTensor:
    """A tensor of a run.

    Attributes:
        name: The name, as in its records.
        shape: The shape of one micro-batch; None if it is unknown.
        dtype: The dtype; None if it is unknown.
        module: The module that it belongs to, as ``named_modules()`` spells it; empty for the model
            itself, or if it is unknown.
        kind: What it is, such as ``gradient``; empty if it is unknown.
        source: ``file:line`` of the code that it comes from; empty if it is unknown.
    """

    name: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    module: str = ""
    kind: str = ""
    source: str = ""


def row_of(tensor: DescribedTensor) -> tuple[str, str | None, str | None, str, str, str]:
    """Return what the file has of a tensor."""
    shape = None if tensor.shape is None else json.dumps([int(size) for size in tensor.shape])
    dtype = None if tensor.dtype is None else dtype_name(tensor.dtype)
    return tensor.name, shape, dtype, tensor.module, str(tensor.kind), tensor.source


def tensor_of(row: Sequence[Any]) -> RecordedTensor:
    """Return the tensor that a row of a file describes.

    Raises:
        ValueError: The row is not as ``row_of`` makes it.
    """
    name, shape, dtype, *texts = row
    if len(row) != _NUM_FIELDS or any(type(text) is not str for text in (name, *texts)):
        raise ValueError("the description of a tensor has something else than text")
    return RecordedTensor(name, _shape(shape), _dtype(dtype), *texts)


def _shape(text: Any) -> tuple[int, ...] | None:
    sizes = None if text is None else json.loads(text)
    if sizes is None:
        return None
    if type(sizes) is not list or any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError(f"{text!r:.100} is not a shape")
    return tuple(sizes)


def _dtype(name: Any) -> torch.dtype | None:
    if name is None:
        return None
    found = vars(torch).get(name) if type(name) is str else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r:.100} is not a dtype")
    return found


def printable(text: str) -> str:
    """Return a text of a file for a terminal: what cannot be printed is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
