"""The source of a queue's elements: anything that can be iterated, or indexed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from popsim_torch.errors import Error, UsageTypeError

__all__ = ["Source"]


class Source:
    """A dataset that can be iterated once or several times.

    Args:
        dataset: A ``DataLoader``, another iterable, or a function that makes one, whose items are
            elements; or a map-style dataset, a tensor or an array, whose entries are elements.
        repeat: Whether to start again at the end of the dataset.

    Attributes:
        can_restart: Whether the dataset can be iterated more than once.

    Raises:
        Error: ``repeat`` is True, and the dataset can be iterated only once.
        UsageTypeError: The dataset cannot be iterated.
    """

    def __init__(self, dataset: Any, repeat: bool = False) -> None:
        self._dataset = dataset
        self._repeat = repeat
        self._passes = _passes(dataset)
        self.can_restart = not isinstance(dataset, Iterator)
        if repeat and not self.can_restart:
            raise Error(
                "InfeedQueue: repeat=True needs a dataset that can be iterated several times, and "
                f"a {type(dataset).__name__} cannot. Give a function that makes one."
            )

    def goes_through(self, iterator: Iterator[Any]) -> bool:
        """Whether the dataset is this iterator."""
        return iterator is self._dataset

    def items(self) -> Iterator[Any]:
        """Return an iterator from the beginning, or from the current position of an iterator.

        If the dataset draws its seeds when the iteration begins, it does so in the calling thread.
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
            items = None  # so a loader ends its workers
            if is_empty:
                raise Error("InfeedQueue: the dataset has no element, so it cannot be repeated.")
            items = iter(self._passes())


def _passes(dataset: Any) -> Callable[[], Iterable[Any]]:
    """Return a function that begins a pass through a dataset."""
    if isinstance(dataset, (str, bytes, Mapping)) or dataset is None:
        advice = "Give a list of elements, a torch Dataset or DataLoader, or a function."
        raise UsageTypeError(f"InfeedQueue: a {type(dataset).__name__} is not a dataset. {advice}")
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
