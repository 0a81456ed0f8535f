"""``AsynchronousDataAccessor``: iterates any dataset in another process."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from typing import Any

import torch

from popsim_torch.data import worker
from popsim_torch.data.batch_loader import BatchLoader
from popsim_torch.data.process import WorkerProcess, start_error
from popsim_torch.data.ring import Ring
from popsim_torch.enums import SharingStrategy
from popsim_torch.errors import Error, UsageAssertionError, UsageTypeError, UsageValueError
from popsim_torch.private_torch.loaders import forget_workers
from popsim_torch.queue_state import QueueState, register_loader

__all__ = ["AsynchronousDataAccessor"]

# The number of elements that the caller may keep in the ring: a loop has one while it asks for the
# next.
_NUM_KEPT = 2


class AsynchronousDataAccessor:
    """Loads the elements of a dataset in a worker process, in advance of the loop that reads them.

    Elements are tensors, flat lists or tuples of tensors, dicts of tensors, or objects of a type of
    ``registerCustomArgParser``; the first element determines dtypes and shapes. A list or a tuple
    is returned as a list, a dict of any kind as a dict; other objects are reconstructed from the
    first one and each element's tensors. The tensors are in shared memory, to which the worker has
    written them. The caller may keep them: memory is only used again when nothing refers to it. A
    caller that keeps more elements than a loop does gets copies.

    With every strategy the worker starts with the caller's random state. The accessor must be made
    in the main process. Only one pass at a time is possible: ``iter`` starts a new pass through the
    data.

    Args:
        dataset: Any iterable, which must allow as many passes as needed.
        buffer_size: The number of elements to load in advance.
        miss_sleep_time_in_ms: No effect: a worker without a free slot is woken up when a slot
            becomes free.
        load_indefinitely: Whether the worker begins the next pass as soon as it has finished one,
            instead of waiting for a request.
        early_preload: Whether to load ``buffer_size`` elements at once, instead of one.
        sharing_strategy: How the dataset reaches the worker. All strategies except ``Fork`` need a
            dataset that can be pickled, and in scripts ``if __name__ == "__main__":`` around the
            program.
        rebatched_size: If not None, elements are batches, which are split and joined to batches of
            this number of samples, more than 1. Samples that are left over are dropped.

    Raises:
        UsageAssertionError: ``rebatched_size`` is not an int or below 2, or is missing for a
            poptorch ``DataLoader`` that does not drop its last batch; ``sharing_strategy`` is not a
            ``SharingStrategy``; or this is not the main process.
        UsageValueError: ``buffer_size`` is below 1.
        Error: The dataset is a ``DataLoader`` in an asynchronous mode; the worker could not load
            the first element, and has printed the reason; or the dataset cannot be pickled.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: SharingStrategy = SharingStrategy.ForkServer,
        rebatched_size: int | None = None,
    ) -> None:
        _check(buffer_size, sharing_strategy, rebatched_size)
        self._dataset = dataset
        self._rebatched_size = rebatched_size
        # The number of the caller's current pass.
        self._pass = 0
        self._is_advanced = False
        self._is_finished = False
        # Slots whose tensors the caller has, and those of them that nothing refers to any more.
        self._num_kept = 0
        self._dead_slots: deque[int] = deque()
        self._num_ready = self._num_waits = 0
        self._seconds_waited = self._seconds_full = 0.0

        settings = worker.Settings(
            num_slots=buffer_size + _NUM_KEPT,
            num_ahead=1 if load_indefinitely else 0,
            early_preload=early_preload,
            rebatched_size=rebatched_size,
            keep_rest=_keeps_rest(dataset, rebatched_size),
            any_shape=isinstance(dataset, BatchLoader) and dataset.has_batch_sampler,
        )
        self._buffer_size = buffer_size
        self._worker = WorkerProcess(_without_workers(dataset), settings, sharing_strategy)
        # The priority makes this run before multiprocessing itself waits for its children at exit.
        self._finalizer = Finalize(self, self._worker.stop, exitpriority=100)
        with self._all_or_nothing():
            self._layout, self._ring = self._receive_start(settings.num_slots)

    def terminate(self) -> None:
        """End the worker: ask it to end, interrupt it, then kill it; may be called repeatedly.

        The worker also ends when the accessor is deleted or the program ends.
        """
        self._worker.stop()

    def __len__(self) -> int:
        """Return the length of the dataset, or with rebatching the number of batches.

        Raises:
            TypeError: The dataset has no length.
        """
        dataset: Any = self._dataset
        size = self._rebatched_size
        if size is None or (isinstance(dataset, BatchLoader) and dataset.is_rebatched):
            return len(dataset)
        batch_size = getattr(dataset, "batch_size", None)
        if batch_size is None:
            raise UsageTypeError(
                "len(AsynchronousDataAccessor): the dataset has no batch_size, so the number of "
                "rebatched elements is not known."
            )
        return int(len(dataset) * batch_size // size)

    def __iter__(self) -> AsynchronousDataAccessor:
        """Start a new pass, unless the latest pass has not returned an element yet.

        Raises:
            UsageAssertionError: The worker was terminated or has died.
        """
        self._check_running()
        if self._pass == 0 or self._is_advanced:
            with self._all_or_nothing():
                self._pass += 1
                register_loader(self)
                self._is_advanced = self._is_finished = False
                try:
                    self._worker.send(worker.Pass(self._pass))
                except OSError:
                    raise self._dead_error() from None
        return self

    def __next__(self) -> Any:
        """Return the next element; wait until it is loaded.

        An interrupt during the wait changes nothing; a later interrupt terminates the worker.

        Raises:
            StopIteration: The pass is over.
            UsageAssertionError: The worker was terminated or has died.
        """
        self._check_running()
        if self._pass == 0:
            iter(self)
        if self._is_finished:
            raise StopIteration
        while True:
            with self._all_or_nothing():
                self._free_dead_slots()
                has_come = self._fetch()
            if not has_come:
                self._wait()
            with self._all_or_nothing():
                message = self._receive()
                if message.number < self._pass:  # the caller has left that pass early
                    self._free(message.slot)
                    continue
                self._is_advanced = True
                self._is_finished = message.slot is None
                element = self._take(message)
            if self._is_finished:
                raise StopIteration
            return element

    def _fetch(self) -> bool:
        """Count the elements that are ready, and return whether there is a message."""
        messages = self._worker.fetch()
        filled = [one for one in messages if isinstance(one, worker.Filled)]
        self._num_ready = sum(one.slot is not None and one.number >= self._pass for one in filled)
        if filled:
            self._seconds_full = filled[-1].seconds_full
        return bool(messages)

    def _wait(self) -> None:
        """Wait for a message, or for the end of the worker."""
        began = time.monotonic()
        self._num_waits += 1
        try:
            self._worker.wait()
        finally:
            self._seconds_waited += time.monotonic() - began

    def _queue_state(self) -> QueueState | None:
        if self._worker.is_stopped:
            return None
        is_loader = isinstance(self._dataset, BatchLoader)
        return QueueState(
            name="DataLoader" if is_loader else "AsynchronousDataAccessor",
            # Before the loop keeps elements, there is room for more.
            ready=min(self._num_ready, self._buffer_size),
            depth=self._buffer_size,
            waits=self._num_waits,
            seconds_waited=self._seconds_waited,
            seconds_full=self._seconds_full,
        )

    def _take(self, message: worker.Filled) -> Any:
        """Return the element of a slot, and make sure that the slot is freed later."""
        slot = message.slot
        if slot is None:
            return None
        if message.tensors is not None:
            self._free(slot)
            return self._layout.build(pickle.loads(message.tensors))
        if self._num_kept < _NUM_KEPT:
            self._num_kept += 1
            return self._layout.build(self._ring.tensors(slot, self._dead_slots.append))
        copies = [tensor.clone() for tensor in self._ring.tensors(slot)]
        self._free(slot)
        return self._layout.build(copies)

    def _free_dead_slots(self) -> None:
        while self._dead_slots:
            self._num_kept -= 1
            self._free(self._dead_slots.popleft())

    def _free(self, slot: int | None) -> None:
        if slot is not None:
            with suppress(OSError):  # A dead worker may have left elements to read.
                self._worker.send(slot)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """End the worker if an interrupt or an error leaves it in an unknown state."""
        try:
            yield
        except BaseException:
            self.terminate()
            raise

    def _receive_start(self, num_slots: int) -> tuple[Any, Ring]:
        try:
            message = self._worker.receive()
            if isinstance(message, worker.Failed):
                raise start_error(f"{message.text} (its traceback is on stderr)")
            file = self._worker.receive_file()
        except EOFError:
            raise start_error(
                "it ended before it had loaded an element; stderr may have the reason. Scripts "
                "need "
                '`if __name__ == "__main__":` around the program.'
            ) from None
        finally:
            self._worker.forget_data()
        try:
            start: worker.Start = pickle.loads(message)
            return start.layout, Ring(start.types, num_slots, file)
        finally:
            os.close(file)

    def _receive(self) -> worker.Filled:
        try:
            message = self._worker.receive()
        except EOFError:
            raise self._dead_error() from None
        if isinstance(message, worker.Failed):
            raise self._dead_error(f" of {message.text} (its traceback is on stderr)")
        assert isinstance(message, worker.Filled)
        return message

    def _dead_error(self, reason: str = "") -> Error:
        return UsageAssertionError(
            f"AsynchronousDataAccessor: the worker process {self._worker.pid} died{reason}. Make a "
            "new accessor or loader to go on."
        )

    def _check_running(self) -> None:
        if self._worker.is_stopped:
            raise UsageAssertionError(
                "AsynchronousDataAccessor: the worker process was terminated. Make a new accessor "
                "or loader to go on."
            )


def _check(buffer_size: object, sharing_strategy: object, rebatched_size: object) -> None:
    if multiprocessing.parent_process() is not None:
        raise UsageAssertionError(
            "AsynchronousDataAccessor must be made in the main process. If this is a script, a "
            'worker has imported it: put the program under `if __name__ == "__main__":`.'
        )
    if not isinstance(buffer_size, int) or buffer_size < 1:
        raise UsageValueError(
            f"AsynchronousDataAccessor: buffer_size={buffer_size!r} must be an int of at least 1."
        )
    if not isinstance(sharing_strategy, SharingStrategy):
        raise UsageAssertionError(
            f"AsynchronousDataAccessor: sharing_strategy={sharing_strategy!r} is not a "
            "poptorch.SharingStrategy."
        )
    if rebatched_size is not None and (type(rebatched_size) is not int or rebatched_size <= 1):
        raise UsageAssertionError(
            f"AsynchronousDataAccessor: rebatched_size={rebatched_size!r} must be None or an int "
            "that exceeds 1."
        )


def _keeps_rest(dataset: object, rebatched_size: int | None) -> bool:
    """Check a poptorch loader, and return whether its short last batch is returned."""
    if not isinstance(dataset, BatchLoader):
        return False
    if dataset.is_asynchronous:
        raise Error(
            "AsynchronousDataAccessor: the DataLoader already has an accessor. Iterate the loader "
            "itself, or make it with DataLoaderMode.Sync."
        )
    size = dataset.combinedBatchSize
    if (
        rebatched_size is None
        and dataset.keeps_rest
        and not dataset.has_batch_sampler
        and size is not None
        and size > 1
    ):
        raise UsageAssertionError(
            "AsynchronousDataAccessor: the last batch of a DataLoader with drop_last=False may be "
            "too short. Pass rebatched_size, or make the loader with drop_last=True."
        )
    return dataset.is_rebatched and dataset.keeps_rest


def _without_workers(dataset: Iterable[Any]) -> Iterable[Any]:
    """Return the dataset; for a loader, a copy that will start its own workers."""
    if not isinstance(dataset, torch.utils.data.DataLoader):
        return dataset
    loader = copy.copy(dataset)
    forget_workers(loader)
    return loader
