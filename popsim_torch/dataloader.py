"""``DataLoader``: PyTorch's loader, cutting the data into the batches one call of a model takes."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from popsim_torch.arguments.structures import Node, TensorNode, describe
from popsim_torch.enums import DataLoaderMode
from popsim_torch.errors import (
    Error,
    UsageAssertionError,
    UsageTypeError,
    UsageValueError,
    not_supported_yet,
)
from popsim_torch.options import Options

__all__ = ["DataLoader"]

T_co = TypeVar("T_co", covariant=True)

_logger = logging.getLogger("poptorch::python")


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """A loader whose batches hold the samples of one whole call of a model.

    An item has ``combinedBatchSize`` samples in dimension 0, in the order of the dataset; that is
    the layout a model made with the same options splits. The options are frozen.

    Args:
        options: The options of the model. For inference use options with a gradient accumulation of
            1.
        dataset: A map-style or an iterable dataset.
        batch_size: The samples of one micro-batch (count); None for no batching, which needs
            ``drop_last=False``.
        shuffle: Whether to visit the samples in random order.
        num_workers: Processes that load data (count); 0 loads in the calling process.
        drop_last: Whether to leave out a last batch that is incomplete. Such a batch does not fit
            the compiled model, so this is True by default, unlike PyTorch's.
        persistent_workers: Whether the worker processes outlive an iteration; if None, they do.
        auto_distributed_partitioning: Whether to divide the data among the processes of
            ``options.Distributed``; no effect, as this version runs only one.
        mode: Only ``DataLoaderMode.Sync`` in this version.
        async_options: Arguments for the asynchronous modes; no effect in ``Sync`` mode.
        rebatched_worker_size: Samples a worker of the rebatched mode loads at a time (count); no
            effect in ``Sync`` mode.
        batch_sampler: Gives the indices of one micro-batch at a time, instead of ``batch_size`` and
            ``shuffle``. Each is collated, then as many as one call takes are joined in dimension 0;
            ``len(loader)`` is the length of the sampler all the same.
        **kwargs: Passed on to ``torch.utils.data.DataLoader``.

    Raises:
        UsageAssertionError: ``options`` or ``mode`` is of the wrong type, ``async_options`` sets
            ``rebatched_size``, or ``rebatched_worker_size`` exceeds the combined batch size.
        UsageValueError: The options make the combined batch size less than 1.
        Error: ``batch_sampler`` is given together with ``batch_size`` or ``shuffle``, or the mode
            or the number of processes is not supported.
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
                "DataLoader: batch_sampler decides size and order of the batches, and excludes "
                f"batch_size={batch_size!r} and shuffle={shuffle!r}. Leave these out."
            )
        factor = _micro_batches_per_call(options)
        micro_batch_size = getattr(batch_sampler, "batch_size", None) or batch_size
        self._options = options
        self._combined_batch_size = None if micro_batch_size is None else micro_batch_size * factor
        self._num_joined = 1 if batch_sampler is None else factor
        self._drops_last = drop_last
        _check_rebatched_size(rebatched_worker_size, self._combined_batch_size)
        if options.Distributed.numProcesses > 1:
            raise not_supported_yet(
                f"DataLoader: {options.Distributed.numProcesses} processes",
                "a data set divided among processes",
                "Start one process.",
            )
        if mode != DataLoaderMode.Sync:
            raise not_supported_yet(
                f"DataLoader(mode=DataLoaderMode.{mode.name})",
                "asynchronous loading",
                "Use DataLoaderMode.Sync, with num_workers to load in other processes.",
            )

        has_sampler = batch_sampler is not None
        super().__init__(
            dataset,
            batch_size=1 if has_sampler else self._combined_batch_size,
            shuffle=shuffle,
            num_workers=num_workers,
            drop_last=drop_last and not has_sampler,
            persistent_workers=num_workers > 0
            if persistent_workers is None
            else persistent_workers,
            batch_sampler=batch_sampler,
            **kwargs,
        )
        if has_sampler:
            # PyTorch leaves these unset beside a sampler, and guards them against assignment.
            object.__setattr__(self, "batch_size", 1)
            object.__setattr__(self, "drop_last", drop_last)
        self._warn_about_data(batch_sampler)
        options.freeze()

    @property
    def combinedBatchSize(self) -> int | None:
        """The samples of one call of the model (count), or None without batching.

        It is the micro-batch size times device iterations, replicas that get their own data and
        gradient accumulation.
        """
        return self._combined_batch_size

    @property
    def options(self) -> Options:
        """The options the loader was given."""
        return self._options

    def terminate(self) -> None:
        """Do nothing: only the asynchronous modes have something to stop."""

    def __iter__(self) -> Any:
        """Return an iterator over the batches of one pass through the data."""
        batches = super().__iter__()
        return batches if self._num_joined == 1 else self._joined(batches)

    def _joined(self, batches: Iterator[Any]) -> Iterator[Any]:
        while group := list(islice(batches, self._num_joined)):
            if len(group) == self._num_joined or not self._drops_last:
                yield _join(group)

    def _warn_about_data(self, batch_sampler: object) -> None:
        if isinstance(self.dataset, IterableDataset):
            if self.num_workers > 1 and self.worker_init_fn is None:
                _logger.warning(
                    "DataLoader: each of the %d workers returns every element of an "
                    "IterableDataset, so each element comes %d times. "
                    "Pass a worker_init_fn that divides the data.",
                    self.num_workers,
                    self.num_workers,
                )
            return
        size = self._combined_batch_size if batch_sampler is None else self._num_joined
        if self._drops_last or size is None:
            return
        source = self.sampler if batch_sampler is None else batch_sampler
        left = operator.length_hint(source) % size  # 0 if the source does not know its length
        if left:
            _logger.warning(
                "DataLoader: with drop_last=False the last batch has %d %s instead of %d. "
                "It does not fit the compiled model.",
                left,
                "samples" if batch_sampler is None else "micro-batches",
                size,
            )


def _check_types(options: object, mode: object, async_options: dict[str, Any] | None) -> None:
    if not isinstance(options, Options):
        raise UsageAssertionError(
            f"DataLoader: options is a {type(options).__name__}. Pass a poptorch.Options first."
        )
    if not isinstance(mode, DataLoaderMode):
        raise UsageAssertionError(f"DataLoader: mode={mode!r} is not a poptorch.DataLoaderMode.")
    if "rebatched_size" in (async_options or {}):
        raise UsageAssertionError(
            "DataLoader: async_options may not set rebatched_size. Use rebatched_worker_size and "
            "DataLoaderMode.AsyncRebatched."
        )


def _check_rebatched_size(size: int | None, combined_batch_size: int | None) -> None:
    if size is not None and combined_batch_size is not None and size > combined_batch_size:
        raise UsageAssertionError(
            f"DataLoader: rebatched_worker_size={size} exceeds the combined batch size, "
            f"{combined_batch_size}."
        )


def _micro_batches_per_call(options: Options) -> int:
    """Return how many micro-batches with data of their own one call takes (count)."""
    groups = options.replication_factor // options.input_group_size
    factor = options.device_iterations * groups * options.Training.gradient_accumulation
    if factor < 1:
        raise UsageValueError(
            f"DataLoader: {options.device_iterations} device iterations, {groups} replicas and a "
            f"gradient accumulation of {options.Training.gradient_accumulation} leave no "
            "micro-batch to load. Each must be at least 1."
        )
    return factor


class _Part(TensorNode):
    """A tensor in a batch; those at the same place in other batches may be longer or shorter."""

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


def _join(batches: Sequence[Any]) -> Any:
    """Return batches of one structure as a single one, its tensors joined in dimension 0."""
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
