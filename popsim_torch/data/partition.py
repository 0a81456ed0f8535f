"""Chooses the samples of a dataset that each of several processes loads."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

__all__ = ["Partition"]


class Partition(Sampler[int]):
    """The indices of one process: in each pass a contiguous block of all indices.

    If incomplete batches are dropped, all processes get the same number of batches. If the data is
    shuffled as well, the blocks are at the end of the permutation in every other pass, starting
    with the first: two passes together use every position.

    Args:
        num_samples: The number of samples in the dataset.
        process_id: The number of this process, from 0.
        num_processes: The number of processes that share the dataset.
        batch_size: The number of samples in a combined batch.
        drop_last: Whether incomplete batches are dropped.
        seed: The seed of the permutations: each pass has a new one, which is the same in all
            processes. None for the order of the dataset.
    """

    def __init__(
        self,
        num_samples: int,
        process_id: int,
        num_processes: int,
        batch_size: int,
        drop_last: bool,
        seed: int | None,
    ) -> None:
        self._num_samples = num_samples
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._is_shifted = False
        self._num_left_over = 0
        if drop_last:
            size = num_samples // (batch_size * num_processes) * batch_size
            self._block = slice(process_id * size, (process_id + 1) * size)
            self._num_left_over = num_samples - num_processes * size
        else:
            size, num_longer = divmod(num_samples, num_processes)
            start = process_id * size + min(process_id, num_longer)
            self._block = slice(start, start + size + (process_id < num_longer))

    def __len__(self) -> int:
        """Return the number of samples that this process loads in a pass."""
        return self._block.stop - self._block.start

    def __iter__(self) -> Iterator[int]:
        """Return the indices of the next pass."""
        if self._generator is None:
            return iter(range(self._block.start, self._block.stop))
        permutation = torch.randperm(self._num_samples, generator=self._generator)
        self._is_shifted = not self._is_shifted
        if self._is_shifted:
            permutation = permutation[self._num_left_over :]
        return iter(permutation[self._block].tolist())
