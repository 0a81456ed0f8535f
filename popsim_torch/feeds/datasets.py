"""Where a queue's elements come from: everything that can be iterated, or indexed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from popsim_torch.errors import Error, UsageTypeError

__all__ = ["Source"]


class Source:
    """A dataset that can be gone through, as often as it allows.

    Args:
        dataset: A ``DataLoader``, another iterable, or a function that makes one: its items are
            elements. Of a map-style dataset, a tensor or an array, the items are.
        repeat: Begin anew at its end.

    Attributes:
        can_restart: Whether it can be gone through more than once.

    Raises:
        Error: It is to be repeated, and can be gone through only once.
        UsageTypeError: It is nothing that can be gone through.
    """

    def __init__(self, dataset: Any, repeat: bool = False) -> None:
        self._dataset = dataset
        self._repeat = repeat
        self._passes = _passes(dataset)
        self.can_restart = not isinstance(dataset, Iterator)
        if repeat and not self.can_restart:
            raise Error(
                f"InfeedQueue: repeat=True needs a dataset that can be gone through again, and a "
                f"{type(dataset).__name__} cannot. Give a function that makes one."
            )

    def goes_through(self, iterator: Iterator[Any]) -> bool:
        """Whether an iterator is the dataset."""
        return iterator is self._dataset

    def items(self) -> Iterator[Any]:
        """Return an iterator from the beginning, or from where a one-way dataset is.

        Its seeds are drawn as far as the dataset draws them here, in the calling thread.
        """
        first = iter(self._passes())
        return self._again_and_again(first) if self._repeat else first

    def _again_and_again(self, first: Iterator[Any]) -> Iterator[Any]:
        items: Iterator[Any] | None = first
        while items is not None:
            is_empty = True
            for item in items:
                is_empty = False
                yield item
            items = None  # a loader ends its workers
            if is_empty:
                raise Error("InfeedQueue: the dataset has no element, so it cannot be repeated.")
            items = iter(self._passes())


def _passes(dataset: Any) -> Callable[[], Iterable[Any]]:
    """Return what begins a pass through a dataset."""
    if isinstance(dataset, (str, bytes, Mapping)) or dataset is None:
        advice = "Give a list of elements, a torch Dataset or DataLoader, or a function."
        raise UsageTypeError(f"InfeedQueue: a {type(dataset).__name__} is no dataset. {advice}")
    if isinstance(dataset, (torch.Tensor, np.ndarray)):
        if dataset.ndim == 0:
            raise UsageTypeError("InfeedQueue: the dataset is a single number, without an axis.")
        if isinstance(dataset, torch.Tensor) and dataset.is_nested:
            return dataset.unbind
        return lambda: _indexed(dataset)
    if isinstance(dataset, Dataset) and not isinstance(dataset, IterableDataset):
        return lambda: _indexed(dataset)
    if not isinstance(dataset, type):
        if hasattr(dataset, "__iter__"):
            return lambda: dataset
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            return lambda: _indexed(dataset)
    if callable(dataset):
        return lambda: _passes(dataset())()
    raise UsageTypeError(
        f"InfeedQueue: a {type(dataset).__name__} cannot be iterated. Give an iterable of tensors, "
        "tuples or dictionaries, a torch Dataset or DataLoader, or a function that makes one."
    )


def _indexed(dataset: Any) -> Iterator[Any]:
    for index in range(len(dataset)):
        yield dataset[index]
