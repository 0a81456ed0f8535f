"""Iterators as arguments of a function: each call has another one, for the same programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from popsim_torch.data.accessor import AsynchronousDataAccessor
from popsim_torch.errors import Error
from popsim_torch.feeds import InfeedQueue
from popsim_torch.feeds.datasets import Source
from popsim_torch.feeds.infeed import queue_of
from popsim_torch.loops.host_iterators import is_same_position, position_of

__all__ = ["ArgumentIterators", "is_fed"]

_NONE: tuple[Any, ...] = ()


def is_fed(leaf: object) -> bool:
    """Return whether programs can take elements from an argument that differs in each call.

    They cannot for an object that restarts when it is iterated, or that a queue already reads.
    """
    others = (InfeedQueue, AsynchronousDataAccessor, nn.Module)
    if isinstance(leaf, others) or not isinstance(leaf, Iterator):
        return False
    queue = queue_of(leaf)
    return queue is None or isinstance(queue, _ArgumentQueue)


class _ArgumentQueue(InfeedQueue):
    """Reads the iterator of a call, and makes exactly as many elements as each loop takes.

    So no elements are prepared when a loop ends, and nothing has to be kept after a call. If the
    number is unknown (``while_loop``), or if a run fails, prepared elements are kept until the
    queue gets another iterator.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        super().__init__(iterator)
        self._iterator: Iterator[Any] | None = iterator
        self._at_hand: tuple[Any, list[torch.Tensor]] | None = None
        self._failed = False
        self.moved_on_host = False
        self._position: list[Any] | None = position_of(iterator)

    def bind(self, iterator: Iterator[Any]) -> None:
        """Read another iterator from now on."""
        if iterator is not self._iterator:
            self._drop_elements()
            self._iterator, self._source = iterator, Source(iterator)

    def release(self) -> None:
        """Drop the iterator, unless elements of it are already prepared."""
        self._look_at_position()
        self._position = None
        if self._producer is None or self._failed:
            self._iterator, self._source, self._at_hand = None, Source(_NONE), None

    def _look_at_position(self) -> None:
        """Check whether the host has taken elements itself, during the recording call."""
        if self._position is None or self._iterator is None:
            return
        if self._producer is None and self._at_hand is None:
            now = position_of(self._iterator)
            self.moved_on_host |= not is_same_position(self._position, now)

    def _drop_elements(self) -> None:
        if self._producer is not None:
            self._producer.stop()
        if self._ring is not None:
            self._ring.clear()
        self._producer, self._at_hand, self._failed = None, None, False

    def _start(self) -> None:
        """Make the first element of a run in this thread; the run makes the others."""
        self._process.check()
        with self._lock:
            self._check_open()
            if self._failed:
                self._drop_elements()
            if self._producer is None and self._at_hand is None:
                self._look_at_position()
                self._at_hand = self._first()
                self._filled_ring()

    def _first(self) -> tuple[Any, list[torch.Tensor]]:
        try:
            return super()._first()
        except Error as error:
            if self._kind is None:
                raise
            raise type(error)(
                f"poptorch.function: an iterator that is an argument: {error.message}"
            ) from error

    def _begin_run(self, iterations: int | None = None) -> None:
        super()._begin_run(iterations)
        with self._lock:
            if self._at_hand is not None:
                (items, first), self._at_hand = self._at_hand, None
                self._produce(items, first, iterations)

    def _end_run(self, error: BaseException | None) -> None:
        super()._end_run(error)
        producer = self._producer
        if producer is None:
            return
        if error is not None:
            producer.ask_to_stop()
            self._failed = True
        elif producer.most is not None:
            producer.stop()
            self._producer = None
            if self._position is not None and self._iterator is not None:
                self._position = position_of(self._iterator)


class ArgumentIterators:
    """The iterators among a function's arguments, and the queues that read them.

    Args:
        iterators: The iterators of the recording call.
    """

    def __init__(self, iterators: Sequence[Iterator[Any]]) -> None:
        self._queues = [_ArgumentQueue(one) for one in distinct(iterators)]

    @contextmanager
    def bound(self, iterators: Sequence[Iterator[Any]]) -> Iterator[None]:
        """Let the queues read the iterators of a call in this scope."""
        try:
            for queue, iterator in zip(self._queues, distinct(iterators), strict=True):
                queue.bind(iterator)
            yield
        finally:
            for queue in self._queues:
                queue.release()

    @property
    def moved_on_host(self) -> bool:
        """Whether the recording call took elements on the host; no other call would do so."""
        return any(queue.moved_on_host for queue in self._queues)


def distinct(iterators: Sequence[Iterator[Any]]) -> list[Iterator[Any]]:
    """Return iterators, each once."""
    return list({id(one): one for one in iterators}.values())
