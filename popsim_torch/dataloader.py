"""``DataLoader``: assembles batches for a model, in this process or in another one."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

from torch.utils.data import Dataset, Sampler

from popsim_torch import profiling
from popsim_torch.data.accessor import AsynchronousDataAccessor
from popsim_torch.data.batch_loader import BatchLoader, combined_batch_size
from popsim_torch.enums import DataLoaderMode
from popsim_torch.errors import Error, UsageAssertionError
from popsim_torch.options import Options

__all__ = ["AsynchronousDataAccessor", "DataLoader"]

T_co = TypeVar("T_co", covariant=True)


class DataLoader(BatchLoader[T_co]):
    """A loader whose batches hold the samples of one whole call of a model.

    Each batch has ``combinedBatchSize`` samples in dimension 0, in the order of the dataset. A
    model with the same options splits a batch of this layout. The options are frozen.

    In the asynchronous modes another process loads batches in advance; see
    ``AsynchronousDataAccessor`` for the requirements on the dataset and on scripts. A batch is then
    a tensor, or a list or dict of tensors, whatever container the collate function returns.

    Args:
        options: The options of the model. For inference use options with a gradient accumulation of
            1.
        dataset: A map-style or an iterable dataset.
        batch_size: The number of samples of one micro-batch; None for no batching, which needs
            ``drop_last=False``.
        shuffle: Whether to load the samples in random order.
        num_workers: The number of processes that load data; 0 loads in the calling process.
        drop_last: Whether to leave out a last batch that is incomplete. Such a batch does not fit
            the compiled model, so this is True by default, unlike PyTorch's.
        persistent_workers: Whether the worker processes stay alive after a pass through the data;
            None means True.
        auto_distributed_partitioning: Whether to divide a map-style dataset among the processes of
            ``options.Distributed``, if there are several. Each gets a contiguous block; with
            ``drop_last`` all get the same number of batches. With ``shuffle`` these are blocks of
            one permutation that is the same in all processes and new in each pass.
        mode: ``Sync`` loads as PyTorch does. ``Async`` loads in another process, in advance of the
            caller. In ``AsyncRebatched`` that process also cuts and joins the batches of the
            workers: all workers together lose at most one incomplete batch of an iterable dataset,
            and a batch may have samples of several workers.
        async_options: Arguments for ``AsynchronousDataAccessor``; ignored in ``Sync`` mode.
        rebatched_worker_size: How many samples a worker of the rebatched mode loads at a time, from
            1 to the combined batch size, which is the default. It does not change the batches that
            the loader returns. Other modes ignore it.
        batch_sampler: Yields the indices of one micro-batch at a time, instead of ``batch_size``
            and ``shuffle``. Each micro-batch is collated, then the micro-batches of one call are
            joined in dimension 0. ``len(loader)`` is still the length of the sampler.
        **kwargs: Passed on to ``torch.utils.data.DataLoader``.

    Raises:
        UsageAssertionError: ``options``, ``mode`` or ``async_options`` is of the wrong type, or
            ``async_options`` sets ``rebatched_size``; ``rebatched_worker_size`` is not from 1 to
            the combined batch size; ``AsyncRebatched`` with a combined batch size of 1 or none; or
            data that should be divided among processes is iterable, not batched, or shuffled
            without a ``randomSeed``.
        UsageValueError: The options make the combined batch size less than 1.
        Error: ``batch_sampler`` is given together with ``batch_size`` or ``shuffle``;
            ``batch_sampler`` or ``sampler`` is given for data that should be divided among
            processes; or the process of an asynchronous mode could not load the first batch.
        ValueError: PyTorch refuses an argument or a combination of them.
    """

    def __init__(
        self,
        options: Options,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: bool | None = None,
        auto_distributed_partitioning: bool = True,
        mode: DataLoaderMode = DataLoaderMode.Sync,
        async_options: dict[str, Any] | None = None,
        rebatched_worker_size: int | None = None,
        batch_sampler: Sampler[list[int]] | Iterable[list[int]] | None = None,
        **kwargs: Any,
    ) -> None:
        _check_types(options, mode, async_options)
        if batch_sampler is not None and (batch_size != 1 or shuffle):
            raise Error(
                "DataLoader: batch_sampler decides size and order of the batches, and cannot be "
                f"combined with batch_size={batch_size!r} and shuffle={shuffle!r}. Leave these out."
            )
        combined = combined_batch_size(options, batch_size, batch_sampler)
        _check_rebatched_size(rebatched_worker_size, combined)
        is_rebatched = _is_rebatched(mode, combined, drop_last, batch_sampler)
        self._accessor: AsynchronousDataAccessor | None = None
        super().__init__(
            options,
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            num_workers=num_workers,
            drop_last=drop_last,
            persistent_workers=persistent_workers,
            auto_distributed_partitioning=auto_distributed_partitioning,
            batch_sampler=batch_sampler,
            chunk_size=(rebatched_worker_size or combined) if is_rebatched else None,
            **kwargs,
        )
        profiling.Channel("dataset").instrument(dataset, "__getitem__")
        if mode != DataLoaderMode.Sync:
            # A copy: the accessor must not keep its owner alive.
            self._accessor = AsynchronousDataAccessor(
                copy.copy(self),
                **(async_options or {}),
                rebatched_size=combined if is_rebatched else None,
            )
        options.freeze()

    @property
    def is_asynchronous(self) -> bool:
        """Whether the batches come from a process that iterates a copy of this loader."""
        return self._accessor is not None

    def terminate(self) -> None:
        """End the process of an asynchronous mode; after that the loader cannot be iterated.

        This does nothing in ``Sync`` mode. The process also ends when the loader is deleted or the
        program ends.
        """
        with profiling.Channel("poptorch.DataLoader").tracepoint("terminate"):
            if self._accessor is not None:
                self._accessor.terminate()

    def __iter__(self) -> Any:
        """Return an iterator over the batches of one pass through the data."""
        with profiling.Channel("poptorch.DataLoader").tracepoint("__iter__"):
            return super().__iter__() if self._accessor is None else iter(self._accessor)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a copy or another process needs to load the batches itself."""
        return {**super().__getstate__(), "_accessor": None}


def _check_types(options: object, mode: object, async_options: Any) -> None:
    if not isinstance(options, Options):
        raise UsageAssertionError(
            f"DataLoader: options is a {type(options).__name__}. Pass a poptorch.Options first."
        )
    if not isinstance(mode, DataLoaderMode):
        raise UsageAssertionError(f"DataLoader: mode={mode!r} is not a poptorch.DataLoaderMode.")
    if async_options is not None and not _are_keywords(async_options):
        raise UsageAssertionError(
            f"DataLoader: async_options={async_options!r:.100} is not a dict of arguments for "
            "AsynchronousDataAccessor by their names, such as {'buffer_size': 5}."
        )
    if "rebatched_size" in (async_options or {}):
        raise UsageAssertionError(
            "DataLoader: async_options may not set rebatched_size. Use rebatched_worker_size and "
            "DataLoaderMode.AsyncRebatched."
        )


def _are_keywords(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _check_rebatched_size(size: int | None, combined_batch_size: int | None) -> None:
    if size is None or combined_batch_size is None:
        return
    if size > combined_batch_size:
        raise UsageAssertionError(
            f"DataLoader: rebatched_worker_size={size} exceeds the combined batch size, "
            f"{combined_batch_size}."
        )
    if size < 1:
        raise UsageAssertionError(f"DataLoader: rebatched_worker_size={size} must be at least 1.")


def _is_rebatched(
    mode: DataLoaderMode, combined: int | None, drop_last: bool, batch_sampler: object
) -> bool:
    """Return whether another process cuts the batches to the combined batch size."""
    if combined is not None and combined < 1:
        return False  # PyTorch refuses this in every mode
    has_parts = combined is not None and combined > 1
    if mode == DataLoaderMode.AsyncRebatched and not has_parts:
        raise UsageAssertionError(
            f"DataLoader(mode=DataLoaderMode.AsyncRebatched): the rebatched size must exceed 1, "
            f"but the combined batch size is {combined}. Use DataLoaderMode.Async."
        )
    if batch_sampler is not None:  # The loader joins its batches and never cuts them.
        return False
    if mode == DataLoaderMode.AsyncRebatched:
        return True
    return mode == DataLoaderMode.Async and not drop_last and has_parts
