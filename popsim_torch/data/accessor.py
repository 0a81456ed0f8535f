"""``AsynchronousDataAccessor``: iterates any dataset in a process of its own."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
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

__all__ = ["AsynchronousDataAccessor"]

# Elements that the caller may keep in the ring: a loop has one while it asks for the next.
_NUM_KEPT = 2


class AsynchronousDataAccessor:
    """Loads the elements of a dataset in a worker process, ahead of the loop that reads them.

    Elements are tensors, flat lists or tuples of tensors, dicts of tensors, or objects of a type of
    ``registerCustomArgParser``; the first one decides on types and shapes. A list or a tuple comes
    back as a list, a dict of any kind as a dict; other objects are reconstructed from the first one
    and each element's tensors. Tensors come in the shared memory that the worker has written them
    to. They are the caller's for as long as they are kept: memory is used again once nothing refers
    to it, and who keeps more than a loop does gets copies.

    The worker starts with the caller's random state, whatever the strategy. It must be made in the
    main process. One iteration at a time is possible: ``iter`` starts a new pass through the data.

    Args:
        dataset: Anything that can be iterated, as often as passes are wanted.
        buffer_size: Elements to load ahead (count).
        miss_sleep_time_in_ms: No effect: a worker without room is woken up when there is some.
        load_indefinitely: Whether the worker begins the next pass as soon as it is done with one,
            rather than when it is asked for.
        early_preload: Whether to load ``buffer_size`` elements at once, rather than one.
        sharing_strategy: How the dataset reaches the worker. All but ``Fork`` need a dataset that
            can be pickled, and in scripts ``if __name__ == "__main__":`` around the program.
        rebatched_size: If not None, elements are batches, which are cut and joined to batches of so
            many samples (count), more than 1. What is left over is dropped.

    Raises:
        UsageAssertionError: ``rebatched_size`` is no int or below 2, or missing for a poptorch
            ``DataLoader`` that does not drop its last batch; ``sharing_strategy`` is no
            ``SharingStrategy``; or this is not the main process.
        UsageValueError: ``buffer_size`` is below 1.
        Error: The dataset is a ``DataLoader`` in an asynchronous mode; the worker could not load
            the first element, for the reason that it has printed; or the dataset cannot be pickled.
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
        # The number of the pass that the caller is in.
        self._pass = 0
        self._is_advanced = False
        self._is_finished = False
        # Slots that the caller has tensors of, and those of them that nothing refers to any more.
        self._num_kept = 0
        self._dead_slots: deque[int] = deque()

        settings = worker.Settings(
            num_slots=buffer_size + _NUM_KEPT,
            num_ahead=1 if load_indefinitely else 0,
            early_preload=early_preload,
            rebatched_size=rebatched_size,
            keep_rest=_keeps_rest(dataset, rebatched_size),
            any_shape=isinstance(dataset, BatchLoader) and dataset.has_batch_sampler,
        )
        self._worker = WorkerProcess(_without_workers(dataset), settings, sharing_strategy)
        # Before multiprocessing itself waits for its children at exit, hence the priority.
        self._finalizer = Finalize(self, self._worker.stop, exitpriority=100)
        with self._all_or_nothing():
            self._layout, self._ring = self._receive_start(settings.num_slots)

    def terminate(self) -> None:
        """End the worker: ask it to, interrupt it, then kill it. Can be called again.

        Deleting the accessor and leaving the program do the same.
        """
        self._worker.stop()

    def __len__(self) -> int:
        """Return the length of the dataset; of one that is rebatched, how many batches it makes.

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
        """Start a new pass, unless the last one that was started has not been advanced.

        Raises:
            UsageAssertionError: The worker is terminated or dead.
        """
        self._check_running()
        if self._pass == 0 or self._is_advanced:
            with self._all_or_nothing():
                self._pass += 1
                self._is_advanced = self._is_finished = False
                try:
                    self._worker.send(worker.Pass(self._pass))
                except OSError:
                    raise self._dead_error() from None
        return self

    def __next__(self) -> Any:
        """Return the next element; wait until it is loaded.

        An interrupt while waiting changes nothing, a later one terminates the worker.

        Raises:
            StopIteration: The pass is over.
            UsageAssertionError: The worker is terminated or dead.
        """
        self._check_running()
        if self._pass == 0:
            iter(self)
        if self._is_finished:
            raise StopIteration
        while True:
            with self._all_or_nothing():
                self._free_dead_slots()
            self._worker.wait()
            with self._all_or_nothing():
                message = self._receive()
                if message.number < self._pass:  # the pass was left early
                    self._free(message.slot)
                    continue
                self._is_advanced = True
                self._is_finished = message.slot is None
                element = self._take(message)
            if self._is_finished:
                raise StopIteration
            return element

    def _take(self, message: worker.Filled) -> Any:
        """Return the element of a slot, and see to it that the slot is free again some day."""
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
        """End the worker if an interrupt or an error leaves unknown what it has been told."""
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
                "it ended before it had loaded an element; stderr may say why. Scripts need "
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
    """Check a poptorch loader, and return whether its short last batch is delivered."""
    if not isinstance(dataset, BatchLoader):
        return False
    if dataset.is_asynchronous:
        raise Error(
            "AsynchronousDataAccessor: the DataLoader has an accessor already. Iterate it itself, "
            "or make it with DataLoaderMode.Sync."
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
    """Return the dataset; of a loader a copy that will start workers of its own."""
    if not isinstance(dataset, torch.utils.data.DataLoader):
        return dataset
    loader = copy.copy(dataset)
    forget_workers(loader)
    return loader
