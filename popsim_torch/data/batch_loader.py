"""``BatchLoader``: PyTorch's loader, which makes the batches for one call of a model."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from popsim_torch.data.join import join
from popsim_torch.data.partition import Partition
from popsim_torch.errors import Error, UsageAssertionError, UsageValueError
from popsim_torch.options import Options
from popsim_torch.private_torch.loaders import state_without_workers

__all__ = ["BatchLoader"]

T_co = TypeVar("T_co", covariant=True)

_logger = logging.getLogger("poptorch::python")


class BatchLoader(torch.utils.data.DataLoader[T_co]):
    """The common part of all modes of a ``DataLoader``: which samples are in which batch.

    Args:
        options: As for ``DataLoader``.
        dataset: As for ``DataLoader``.
        batch_size: As for ``DataLoader``.
        shuffle: As for ``DataLoader``.
        num_workers: As for ``DataLoader``.
        drop_last: As for ``DataLoader``.
        persistent_workers: As for ``DataLoader``.
        auto_distributed_partitioning: As for ``DataLoader``.
        batch_sampler: As for ``DataLoader``.
        chunk_size: If not None, the number of samples in a batch; the last batch may have fewer,
            and another process splits and joins the batches to the combined size.
        **kwargs: As for ``DataLoader``.
    """

    def __init__(
        self,
        options: Options,
        dataset: Dataset[T_co],
        *,
        batch_size: int | None,
        shuffle: bool | None,
        num_workers: int,
        drop_last: bool,
        persistent_workers: bool | None,
        auto_distributed_partitioning: bool,
        batch_sampler: Sampler[list[int]] | Iterable[list[int]] | None,
        chunk_size: int | None,
        **kwargs: Any,
    ) -> None:
        factor = _micro_batches_per_call(options)
        combined = combined_batch_size(options, batch_size, batch_sampler)
        self._options = options
        self._combined_batch_size = combined
        self._drops_last = drop_last
        self._chunk_size = chunk_size
        self.has_batch_sampler = batch_sampler is not None
        self._num_joined = factor if self.has_batch_sampler else 1
        self._num_partitions = 1
        if auto_distributed_partitioning and options.Distributed.numProcesses > 1:
            self._num_partitions = options.Distributed.numProcesses
            taken = [
                name
                for name, value in (
                    ("batch_sampler", batch_sampler),
                    ("sampler", kwargs.get("sampler")),
                )
                if value is not None
            ]
            kwargs["sampler"] = _partition(options, dataset, combined, drop_last, shuffle, taken)
            shuffle = False

        if persistent_workers is None:
            persistent_workers = num_workers > 0
        super().__init__(
            dataset,
            batch_size=1 if self.has_batch_sampler else chunk_size or combined,
            shuffle=shuffle,
            num_workers=num_workers,
            drop_last=drop_last and not self.has_batch_sampler and chunk_size is None,
            persistent_workers=persistent_workers,
            batch_sampler=batch_sampler,
            **kwargs,
        )
        if self.has_batch_sampler:
            # With a sampler PyTorch does not set these attributes, and later forbids their
            # assignment.
            object.__setattr__(self, "batch_size", 1)
            object.__setattr__(self, "drop_last", drop_last)
        self._warn_about_data()

    @property
    def combinedBatchSize(self) -> int | None:
        """The number of samples in one call of the model, or None without batching.

        It is the product of the micro-batch size, the device iterations, the number of replicas
        that get their own data, and the gradient accumulation.
        """
        return self._combined_batch_size

    @property
    def options(self) -> Options:
        """The options of the loader."""
        return self._options

    @property
    def keeps_rest(self) -> bool:
        """Whether an incomplete last batch is returned."""
        return not self._drops_last

    @property
    def is_rebatched(self) -> bool:
        """Whether another process splits and joins the batches to the combined size."""
        return self._chunk_size is not None

    @property
    def is_asynchronous(self) -> bool:
        """Whether the batches come from a process that iterates a copy of this loader."""
        return False

    def __len__(self) -> int:
        """Return the number of batches in one pass of this process."""
        size = self._combined_batch_size
        if self._chunk_size is None or size is None:
            return super().__len__()
        is_stream = isinstance(self.dataset, IterableDataset)
        num_samples = len(self.dataset if is_stream else self.sampler)  # type: ignore[arg-type]
        return num_samples // size if self._drops_last else -(-num_samples // size)

    def __iter__(self) -> Any:
        """Return an iterator over the batches of one pass through the data."""
        batches = super().__iter__()
        return batches if self._num_joined == 1 else self._joined(batches)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a copy or another process needs, without the workers."""
        return state_without_workers(self)

    def _joined(self, batches: Iterator[Any]) -> Iterator[Any]:
        while group := list(islice(batches, self._num_joined)):
            if len(group) == self._num_joined or not self._drops_last:
                yield join(group)

    def _warn_about_data(self) -> None:
        if isinstance(self.dataset, IterableDataset):
            if self.num_workers > 1 and self.worker_init_fn is None:
                _logger.warning(
                    "DataLoader: each of the %d workers returns every element of an "
                    "IterableDataset, so each element is returned %d times. Pass a "
                    "worker_init_fn that divides the data.",
                    self.num_workers,
                    self.num_workers,
                )
            return
        size = self._num_joined if self.has_batch_sampler else self._combined_batch_size
        source = self.batch_sampler if self.has_batch_sampler else self.sampler
        kind = "micro-batches" if self.has_batch_sampler else "samples"
        if size is None:
            return
        if self._drops_last:
            if 0 < operator.length_hint(source) < size:
                _logger.warning(
                    "DataLoader: one call of the model takes %d %s, and there are %d. With "
                    "drop_last=True they are left out, and the loader has no batch at all. Lower "
                    "the batch size, deviceIterations or gradientAccumulation, or pass more data.",
                    *(size, kind, operator.length_hint(source)),
                )
            return
        if self._num_partitions > 1 and len(self.dataset) % (size * self._num_partitions):  # type: ignore[arg-type]
            _logger.warning(
                "DataLoader: with drop_last=False the last batch of this process has %d samples of "
                "%d, as %d samples do not divide into equal batches for %d processes. Short "
                "batches do not fit the compiled model.",
                len(self.sampler) % size or size,  # type: ignore[arg-type]
                size,
                len(self.dataset),  # type: ignore[arg-type]
                self._num_partitions,
            )
            return
        left = operator.length_hint(source) % size  # 0 if the length of the source is unknown
        if left:
            _logger.warning(
                "DataLoader: with drop_last=False the last batch has %d %s instead of %d. "
                "It does not fit the compiled model.",
                left,
                kind,
                size,
            )


def combined_batch_size(
    options: Options, batch_size: int | None, batch_sampler: object
) -> int | None:
    """Return the number of samples in one call of a model, or None without batching.

    Args:
        options: The options of the model.
        batch_size: The number of samples in a micro-batch, or None.
        batch_sampler: If it has a ``batch_size``, that is used instead.

    Raises:
        UsageValueError: The result would be less than 1.
    """
    micro_batch_size = getattr(batch_sampler, "batch_size", None) or batch_size
    factor = _micro_batches_per_call(options)
    return None if micro_batch_size is None else micro_batch_size * factor


def _micro_batches_per_call(options: Options) -> int:
    """Return the number of micro-batches with their own data in one call."""
    groups = options.replication_factor // options.input_group_size
    factor = options.device_iterations * groups * options.Training.gradient_accumulation
    if factor < 1:
        raise UsageValueError(
            f"DataLoader: {options.device_iterations} device iterations, {groups} replicas and a "
            f"gradient accumulation of {options.Training.gradient_accumulation} leave no "
            "micro-batch to load. Each must be at least 1."
        )
    return factor


def _partition(
    options: Options,
    dataset: Dataset[Any],
    combined: int | None,
    drop_last: bool,
    shuffle: bool | None,
    taken: list[str],
) -> Partition:
    """Return the sampler of this process; ``taken`` names arguments that exclude one."""
    num_processes = options.Distributed.numProcesses
    advice = "or pass auto_distributed_partitioning=False and divide the data yourself."
    if taken:
        raise Error(
            f"DataLoader: {taken[0]} excludes dividing the data among {num_processes} processes. "
            f"Leave it out, {advice}"
        )
    if isinstance(dataset, IterableDataset):
        raise UsageAssertionError(
            f"DataLoader: an IterableDataset cannot be divided among {num_processes} processes. "
            f"Use a map-style dataset, {advice}"
        )
    if combined is None:
        raise UsageAssertionError(
            f"DataLoader: batch_size=None excludes dividing the data among {num_processes} "
            f"processes. Set a batch size, {advice}"
        )
    if shuffle and not options.exists("random_seed"):
        raise UsageAssertionError(
            f"DataLoader: shuffling data that is divided among {num_processes} processes needs the "
            f"same seed in all of them. Call options.randomSeed, {advice}"
        )
    return Partition(
        len(dataset),  # type: ignore[arg-type]
        options.Distributed.processId,
        num_processes,
        combined,
        drop_last,
        options.random_seed if shuffle else None,
    )
