"""The data of a fit as a sequence of micro-batches, repeated as often as needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from popsim_torch.data.batch_loader import BatchLoader
from popsim_torch.errors import Error, UsageTypeError
from popsim_torch.private_torch.trees import tree_flatten, tree_map, tree_unflatten

__all__ = ["Batches"]


class Batches:
    """Data as a sequence of micro-batches.

    Args:
        function: The name of the caller, for messages.
        data: Yields batches: a loader, a dataset, or any iterable. An element of a
            ``poptorch.DataLoader`` is split into its micro-batches.
        name: The name of the argument with the data, for messages.

    Raises:
        UsageTypeError: The data is something else.
    """

    def __init__(self, function: str, data: Any, name: str = "the data") -> None:
        self._function, self._name = function, name
        self._data = data
        self._is_indexed = hasattr(data, "__getitem__") and not hasattr(data, "__iter__")
        if not (self._is_indexed or isinstance(data, Iterable)) or isinstance(data, (str, bytes)):
            raise UsageTypeError(
                f"{function}: {name} is a {type(data).__name__}. Pass a DataLoader, a dataset, "
                "or an iterable of batches."
            )
        is_dict = isinstance(data, dict)
        is_tensor = isinstance(data, (torch.Tensor, np.ndarray))
        of = " of samples" if is_tensor else " of tensors"
        if (is_dict or is_tensor) or (
            isinstance(data, tuple) and data and all(isinstance(x, torch.Tensor) for x in data)
        ):
            raise UsageTypeError(
                f"{function}: {name} is a {type(data).__name__}{of}, not of batches. Cut "
                "it into batches: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, "
                "y), batch_size=32, drop_last=True)."
            )
        self._parts = _micro_batches_of(data)

    @property
    def count(self) -> int | None:
        """The number of micro-batches in one pass through the data; None if it is unknown."""
        try:
            return len(self._data) * self._parts
        except (TypeError, NotImplementedError):
            return None

    def stream(self, total: int) -> Iterator[Any]:
        """Yield some number of micro-batches; start the data again where it ends.

        Raises:
            Error: The data cannot start again.
        """
        left = total
        while left:
            before = left
            for element in self._one_pass():
                yield element
                left -= 1
                if not left:
                    return
            if left == before:
                raise Error(
                    f"{self._function}: {self._name} ended after {total - left} of {total} steps, "
                    "and has no batch when it is started again. Pass data that can be iterated "
                    "more than once, such as a DataLoader, or ask for fewer steps."
                )

    def _one_pass(self) -> Iterator[Any]:
        data = self._data
        elements = (data[i] for i in range(len(data))) if self._is_indexed else data
        for element in elements:
            if self._parts == 1:
                yield element
            else:
                yield from _cut(element, self._parts)

    def check_sizes(self, total: int) -> None:
        """Refuse a loader whose last batch is smaller, if some number of steps would reach it.

        Raises:
            Error: The last batch is smaller.
        """
        loader, batches = self._data, self.count
        if (
            not isinstance(loader, torch.utils.data.DataLoader)
            or isinstance(loader, BatchLoader)
            or loader.batch_size is None
            or loader.drop_last
            or batches is None
            or batches < 2
            or total < batches
        ):
            return
        size = loader.batch_size
        try:
            rest = len(loader.sampler) % size  # type: ignore[arg-type]
        except TypeError:
            return
        if rest:
            raise Error(
                f"{self._function}: the last batch of {self._name} has {rest} samples, and all "
                f"others have {size}. A compiled program takes batches of one size: make the "
                "DataLoader with drop_last=True."
            )


def _micro_batches_of(data: Any) -> int:
    """Return the number of micro-batches in an element of the data."""
    if not isinstance(data, BatchLoader) or data.combinedBatchSize is None:
        return 1
    options = data.options
    count: int = options.device_iterations * options.Training.gradient_accumulation
    return count


def _cut(element: Any, parts: int) -> Iterator[Any]:
    leaves, structure = tree_flatten(tree_map(torch.as_tensor, element))
    cut = [leaf.tensor_split(parts) for leaf in leaves]
    for position in range(parts):
        yield tree_unflatten([pieces[position] for pieces in cut], structure)
