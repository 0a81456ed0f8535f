"""``InfeedQueue``: brings the elements of a dataset into a program while it runs."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NoReturn

import torch

from popsim_torch._native import Infeed
from popsim_torch.dtypes import dtype_name
from popsim_torch.errors import Error, UsageTypeError
from popsim_torch.feeds.checks import OneProcess, check_integer, check_placement
from popsim_torch.feeds.datasets import Source
from popsim_torch.feeds.producer import ElementKind, Producer, failure_text, make_stopper
from popsim_torch.feeds.structure import Component, Structure
from popsim_torch.queue_state import QueueState
from popsim_torch.tables import Described

__all__ = ["InfeedQueue", "lasting_queue_of", "queue_of", "taking"]

_MOST_AHEAD = 255
_COUNTERS = ("pushed", "taken", "waits", "seconds_waited", "seconds_full", "ready")

taking: ContextVar[Callable[[InfeedQueue], Any] | None] = ContextVar("taking", default=None)
"""The function that ``next(queue)`` calls; set while the body of a loop is traced."""


class InfeedQueue(Described, AbstractContextManager["InfeedQueue"]):
    """Brings the elements of a dataset into a running program, one for each iteration of its loop.

    A thread iterates the dataset, in advance of the program, and keeps elements ready in the dtypes
    that the device uses. PyTorch uses only that one thread; a ``DataLoader`` with workers prepares
    elements in several processes. An element is a tensor, a tuple or list (positional arguments of
    the body, after the carried values) or a dictionary with string keys (keyword arguments); its
    parts may be nested, and numbers and NumPy arrays count as tensors. All elements have the same
    shapes and dtypes.

    The thread that compiles the program makes the first element, so a loader draws its seed there.
    A run continues in the data where the previous run stopped.

    Args:
        dataset: An iterable of elements, such as a ``DataLoader`` or a generator; a map-style torch
            ``Dataset``, a tensor or an array (an element is an item); or a function that makes one
            of these. From now on only the queue may use it.
        prefetch_depth: The number of elements to make in advance (1 to 255). A pipelined program
            may take more.
        repeat: Whether to start again at the end of the dataset.
        device_ordinal: Where real hardware runs the program; no effect here.
        optimise_latency: How real hardware moves elements; no effect here.

    Raises:
        Error: An argument has a wrong value.
        UsageTypeError: The dataset cannot be iterated.
    """

    def __init__(
        self,
        dataset: Any,
        prefetch_depth: int = 3,
        *,
        repeat: bool = False,
        device_ordinal: int | None = None,
        optimise_latency: bool = False,
    ) -> None:
        where = "InfeedQueue"
        check_integer(where, "prefetch_depth", prefetch_depth, 1, _MOST_AHEAD)
        check_placement(where, device_ordinal, optimise_latency)
        if not isinstance(repeat, bool):
            raise Error(f"{where}: repeat must be True or False, got {repeat!r}.")
        self._source = Source(dataset, repeat)
        self._prefetch_depth = prefetch_depth
        self._process = OneProcess(where)
        self._lock = threading.RLock()
        self._kind: ElementKind | None = None
        self._ring: Infeed | None = None
        self._producer: Producer | None = None
        self._stop_if_dropped: weakref.finalize[Any, InfeedQueue] | None = None
        self._is_active = False
        self._run_began = self._seconds_run = 0.0
        self._closed = False
        self._shown_name = where
        _living.add(self)

    # Start, reset and end of a queue

    @property
    def initializer(self) -> Any:
        """Start to make elements, as programs do by themselves; so does calling the result."""
        self._start()
        return self._start

    def reset(self) -> None:
        """Go back to the beginning of the dataset; elements made in advance are dropped.

        The call waits for the element that is being made.

        Raises:
            Error: A program is running on the queue, or the dataset can be iterated only once.
        """
        with self._lock:
            self._check_open()
            if self._is_active:
                raise Error(
                    "InfeedQueue.reset: a program is running on the queue. Wait until it ends."
                )
            if not self._source.can_restart:
                raise Error(
                    "InfeedQueue.reset: the dataset is an iterator, which can be iterated only "
                    "once. Make the queue with a function that returns one."
                )
            if self._producer is not None:
                self._producer.stop()
                self._producer = None
            if self._ring is not None:
                self._ring.clear()

    def close(self) -> None:
        """Stop making elements; a program that needs another one fails."""
        self._closed = True
        if self._stop_if_dropped is not None:
            self._stop_if_dropped()

    @property
    def deleter(self) -> Any:
        """Close the queue; calling the result does the same."""
        self.close()
        return self.close

    def __exit__(self, *_: object) -> None:
        """Close the queue."""
        self.close()

    # Information about the queue

    @property
    def prefetch_depth(self) -> int:
        """The number of elements to make in advance."""
        return self._prefetch_depth

    @property
    def dequeued(self) -> bool:
        """Whether a program has taken an element."""
        return self._ring is not None and self._ring.statistics()["taken"] > 0

    @property
    def number_of_tuple_elements(self) -> int:
        """The number of arguments of a loop's body in an element; makes the first element."""
        args, kwargs = self._example()
        return len(args) + len(kwargs)

    def get_next(self) -> NoReturn:
        """Raise an Error: loops take elements by themselves."""
        raise Error(
            "InfeedQueue.get_next: loops take the elements by themselves. Pass the queue to "
            "poptorch.repeat(n, body, infeed=queue), whose body gets them as arguments."
        )

    def __iter__(self) -> InfeedQueue:
        """Return the queue, so that ``next(iter(queue))`` works as well."""
        return self

    def __next__(self) -> Any:
        """Return the element of the iteration, in the body of a loop without arguments for it.

        Raises:
            Error: The call is not in the body of a loop, or is the second one in the body.
        """
        take = taking.get()
        if take is None:
            raise Error(
                "InfeedQueue: elements are available only in the body of poptorch.repeat or "
                "poptorch.while_loop, one for each iteration: as arguments, or by next(queue). To "
                "look at the data on the host, iterate the dataset."
            )
        return take(self)

    def statistics(self) -> dict[str, float]:
        """Return counters.

        Returns:
            ``pushed``, ``taken``: the number of elements made, and taken by programs. ``waits``,
            ``seconds_waited``: how often and how long programs waited for data. ``seconds_full``:
            how long the dataset's thread waited for a free slot. ``ready``: the number of elements
            that no program has taken yet. ``depth``: the number of slots. ``seconds_run``: how long
            programs ran. ``starved_fraction``: the share of that time in which they waited, from 0
            to 1.
        """
        found: dict[str, float]
        if self._ring is None:
            found = {**dict.fromkeys(_COUNTERS, 0), "depth": self._prefetch_depth}
        else:
            found = self._ring.statistics()
        with self._lock:
            running = time.monotonic() - self._run_began if self._is_active else 0.0
            seconds_run = self._seconds_run + running
        starved = min(1.0, found["seconds_waited"] / seconds_run) if seconds_run > 0 else 0.0
        return {**found, "seconds_run": seconds_run, "starved_fraction": starved}

    def _queue_state(self) -> QueueState | None:
        if self._ring is None:
            return None
        found = self._ring.statistics()
        return QueueState(
            name=self._shown_name,
            ready=int(found["ready"]),
            depth=int(found["depth"]),
            waits=int(found["waits"]),
            seconds_waited=found["seconds_waited"],
            seconds_full=found["seconds_full"],
        )

    def _figures(self) -> dict[str, object]:
        return {
            "prefetch_depth": self._prefetch_depth,
            **self.statistics(),
            "closed": self._closed,
        }

    def __repr__(self) -> str:
        found = self.statistics()
        return (
            f"InfeedQueue(prefetch_depth={self._prefetch_depth}, {found['pushed']} made, "
            f"{found['taken']} taken, programs waited {found['seconds_waited']:.3g} s"
            f"{', closed' if self._closed else ''})"
        )

    def __reduce__(self) -> NoReturn:
        raise UsageTypeError(
            "InfeedQueue: a queue cannot be copied or sent to another process. Make a new queue "
            "there."
        )

    # Methods that programs call

    @property
    def _native(self) -> Infeed:
        """The native queue from which programs take elements."""
        self._start()
        assert self._ring is not None
        return self._ring

    def _element(self) -> tuple[Structure, list[Component]]:
        """Return the structure of an element; makes the first one, but does not take it.

        Raises:
            Error: The dataset has no element, or fails at the first one, or the queue is closed.
        """
        self._start()
        assert self._kind is not None
        return self._kind.structure, self._kind.components

    def _arguments(
        self, structure: Structure, leaves: Sequence[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for the body of a loop, from the tensors of an element."""
        element = structure.build(leaves)
        if structure.container is None:
            return (element,), {}
        return ((), element) if structure.container is dict else (tuple(element), {})

    def _begin_run(self, iterations: int | None = None) -> None:
        """Note that a program which takes elements begins to run.

        Args:
            iterations: The number of elements it takes; None if it is unknown.

        Raises:
            Error: Another program already takes elements: the elements of each would be random.
        """
        self._start()
        with self._lock:
            if self._is_active:
                raise Error(
                    "InfeedQueue: another program is taking elements from the queue. A queue "
                    "feeds one program at a time: wait until that one ends, or make a queue for "
                    "each."
                )
            self._is_active = True
            self._run_began = time.monotonic()

    def _end_run(self, error: BaseException | None) -> None:
        """Note that a program has ended, with an error if it failed.

        If it failed because the dataset failed, the error of the dataset becomes the cause of the
        program's error.
        """
        with self._lock:
            self._is_active = False
            self._seconds_run += time.monotonic() - self._run_began
        if self._producer is not None and isinstance(error, Error):
            self._producer.explain(error)

    def _failure(self) -> BaseException | None:
        """Return the error that ended the dataset's thread, if any."""
        return None if self._producer is None else self._producer.failure

    # Internals

    def _unused_source(self, where: str) -> Source:
        """Return the dataset, from which no program has taken an element."""
        with self._lock:
            self._check_open()
            if self._ring is not None:
                raise Error(f"{where}: a program uses the queue. Measure one that is not in use.")
            return self._source

    def _check_open(self) -> None:
        self._process.check()
        if self._closed:
            raise Error("InfeedQueue: the queue is closed. Make another one.")

    def _example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        structure, components = self._element()
        return self._arguments(structure, components)

    def _start(self) -> None:
        """Make the first element in this thread, and start another thread for the others."""
        self._process.check()  # (a lock that was held at a fork is never released)
        with self._lock:
            self._check_open()
            if self._producer is not None:
                return
            self._produce(*self._first())

    def _produce(self, items: Any, first: list[torch.Tensor], most: int | None = None) -> None:
        """Start a thread that makes elements after the first one; at most a number, if given."""
        assert self._kind is not None
        ring = self._filled_ring()
        self._producer = Producer(items, first, self._kind, ring, self._source.can_restart, most)
        if self._stop_if_dropped is not None:
            self._stop_if_dropped.detach()
        self._stop_if_dropped = weakref.finalize(self, make_stopper(self._producer, ring))
        self._stop_if_dropped.atexit = False  # the producers stop their threads
        if self._closed:  # closed in the meantime
            self._stop_if_dropped()

    def _filled_ring(self) -> Infeed:
        """Return the ring for elements of the kind of the first one."""
        assert self._kind is not None
        if self._ring is None:
            self._ring = Infeed(
                [dtype_name(dtype) for dtype, _ in self._kind.components],
                [shape for _, shape in self._kind.components],
                self._prefetch_depth,
            )
        return self._ring

    def _first(self) -> tuple[Any, list[torch.Tensor]]:
        """Return the dataset after its first element, and that element's tensors."""
        try:
            items = self._source.items()
            element = next(items)
        except StopIteration:
            raise Error("InfeedQueue: the dataset has no element.") from None
        except Error:
            raise
        except Exception as error:
            raise Error(failure_text(error, 0)) from error
        if self._kind is not None:
            return items, self._kind.tensors_of(element, 0)
        kind, tensors = ElementKind.of(element)
        structure = kind.structure
        if structure.container is dict and not all(isinstance(k, str) for k in structure.keys):
            raise UsageTypeError(
                f"InfeedQueue: the keys of an element are {list(structure.keys)!r}. They become "
                "names of arguments, and must be strings."
            )
        self._kind = kind
        return items, tensors


_living: weakref.WeakSet[InfeedQueue] = weakref.WeakSet()
# An iterator cannot go back to the element at which a program stopped, so its queue is kept.
_of_iterators: list[InfeedQueue] = []


def queue_of(iterator: Iterator[Any]) -> InfeedQueue | None:
    """Return the queue of an iterator; None if there is none."""
    for queue in list(_living):
        if queue._source.goes_through(iterator) and not queue._closed:
            return queue
    return None


def lasting_queue_of(iterator: Iterator[Any]) -> InfeedQueue:
    """Return the queue of an iterator; make one if there is none yet."""
    queue = queue_of(iterator)
    if queue is None:
        queue = InfeedQueue(iterator)
        _of_iterators.append(queue)
    return queue
