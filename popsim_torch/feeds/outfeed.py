"""``OutfeedQueue``: tensors leave a program while it runs."""

from __future__ import annotations

import asyncio
import enum
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from popsim_torch import _native
from popsim_torch.dtypes import dtype_name
from popsim_torch.errors import Error, UsageTimeoutError, not_supported_yet
from popsim_torch.feeds.checks import OneProcess, check_integer, check_placement
from popsim_torch.feeds.runs import Runs
from popsim_torch.feeds.structure import Component, Structure, as_tensor, describe, flatten
from popsim_torch.ops import op_listener

__all__ = ["OutfeedMode", "OutfeedQueue"]

# A wait is made of parts of this length, between which Ctrl-C and the end of a run are seen.
_SECONDS_PER_WAIT = 0.05


class OutfeedMode(enum.IntEnum):
    """Which elements an ``OutfeedQueue`` keeps."""

    ALL = 0
    """All of them, in order, until they are read."""
    LAST = 1
    """The newest one."""


class OutfeedQueue(AbstractContextManager["OutfeedQueue"]):
    """Brings tensors from a running program to the host.

    The program never waits for Python: it writes elements to memory of the queue, and readers take
    them from there, in any thread. Several readers share the elements; each goes to one of them.
    A copy of a model that holds a queue uses the same queue.

    Args:
        mode: Which elements to keep.
        buffer_depth: Elements that there is memory for from the start (count, 1 or more). Where
            readers lag, more is taken.
        max_bytes: The most memory of elements that nobody has read (bytes); None for any amount.
            One element always has a place.
        when_full: What happens to a program that finds ``max_bytes`` used up: ``"wait"`` makes it
            wait for a reader, ``"raise"`` ends it with an Error.
        device_ordinal: Where real hardware runs the program; no effect here.
        optimise_latency: How real hardware moves elements; no effect here.
        replication_factor: Copies of the model; 1.

    Raises:
        Error: An argument is none of these.
    """

    def __init__(
        self,
        mode: OutfeedMode = OutfeedMode.ALL,
        buffer_depth: int = 3,
        max_bytes: int | None = None,
        when_full: str = "wait",
        *,
        device_ordinal: int | None = None,
        optimise_latency: bool = False,
        replication_factor: int = 1,
    ) -> None:
        where = "OutfeedQueue"
        if not isinstance(mode, OutfeedMode):
            raise Error(f"{where}: mode must be a poptorch.OutfeedMode, got {mode!r}.")
        check_integer(where, "buffer_depth", buffer_depth, 1)
        if max_bytes is not None:
            check_integer(where, "max_bytes", max_bytes, 0)
        if when_full not in ("wait", "raise"):
            raise Error(f"{where}: when_full must be 'wait' or 'raise', got {when_full!r}.")
        check_placement(where, device_ordinal, optimise_latency)
        if check_integer(where, "replication_factor", replication_factor, 1) > 1:
            raise not_supported_yet(
                f"{where}(replication_factor={replication_factor})",
                "a model of several copies",
                "Leave it out.",
            )
        self._mode, self._buffer_depth = mode, buffer_depth
        self._max_bytes, self._when_full = max_bytes, when_full
        self._process = OneProcess(where)
        self._maker = threading.get_ident()
        self._runs = Runs()
        self._lock = threading.Lock()
        self._native: _native.Outfeed | None = None
        self._structure = Structure()
        self._components: list[Component] = []
        self._source = ""
        self._synthetic = self._closed = False

    # What programs do

    def enqueue(self, x: Any) -> None:
        """Put an element into the queue, each time the program comes here.

        Args:
            x: A tensor or number, or a tuple, list or dictionary of these, or a nest of them. The
                same at each call that traces forward or the body of a loop.

        Raises:
            Error: It is not called where a program is traced, or the program enqueues to this queue
                already.
            UsageTypeError: There is something else in the element.
        """
        listener = op_listener.get()
        if listener is None:
            raise Error(
                "OutfeedQueue.enqueue: no program is being traced here. Call it in the body of "
                "poptorch.repeat or poptorch.while_loop, or in forward of a model that "
                "poptorch.trainingModel or poptorch.inferenceModel has wrapped."
            )
        self._check_open("enqueue")
        structure, leaves = flatten(x, "OutfeedQueue.enqueue: the element")
        tensors = [
            as_tensor(leaf, f"OutfeedQueue.enqueue: the element{path}")
            for leaf, path in zip(leaves, structure.paths(), strict=True)
        ]
        listener.enqueue(self, structure, tensors)

    def _attach(
        self,
        structure: Structure,
        components: Sequence[Component],
        source: str,
        *,
        synthetic: bool = False,
    ) -> _native.Outfeed:
        """Return what a compiled program writes its elements to.

        Args:
            structure: How the elements are put together.
            components: Element type and shape of each tensor, as it comes back.
            source: The line that enqueues.
            synthetic: The values mean nothing, and nobody is to read them.

        Raises:
            Error: Elements of another program are different, or the queue is closed.
        """
        self._check_open("enqueue")
        components = [(dtype, tuple(shape)) for dtype, shape in components]
        with self._lock:
            if self._native is None:
                self._native = _native.Outfeed(
                    [dtype_name(dtype) for dtype, _ in components],
                    [shape for _, shape in components],
                    synthetic or self._mode == OutfeedMode.LAST,
                    self._buffer_depth,
                    -1 if self._max_bytes is None else self._max_bytes,
                    self._when_full == "raise",
                )
                self._structure, self._components = structure, components
                self._source, self._synthetic = source, synthetic
            elif (structure, components) != (self._structure, self._components):
                raise Error(
                    "OutfeedQueue: the element enqueued at "
                    f"{source} is ({describe(components, structure)}), and the queue has elements "
                    f"({describe(self._components, self._structure)}) from {self._source}. All "
                    "elements of a queue are alike: make another queue for these."
                )
            return self._native

    def _begin_run(self) -> None:
        """A program that feeds the queue begins to run, or to be compiled."""
        self._process.check()
        self._runs.begin()

    def _end_run(self, error: BaseException | None) -> None:
        """It has ended, with an error if it failed."""
        self._runs.end(error)
        if self._native is not None:
            self._native.wake()

    # What readers do

    @property
    def mode(self) -> OutfeedMode:
        """Which elements the queue keeps."""
        return self._mode

    @property
    def enqueued(self) -> bool:
        """Whether there is a compiled program that enqueues to the queue; from any thread."""
        return self._native is not None

    def dequeue(self, wait_for_completion: bool = False, *, timeout: float | None = None) -> Any:
        """Return what has arrived; with ``ALL`` that is removed.

        In another thread than the one that runs the program, that may be nothing.

        Args:
            wait_for_completion: Wait for the end of the programs that feed the queue and run now.
            timeout: The longest time to wait for the first element (seconds); None does not wait.
                With ``wait_for_completion`` the longest time to wait for that.

        Returns:
            ``ALL``: an element whose tensors have a new first axis, of the number of elements
            taken. ``LAST``: the newest element. An empty list if the queue has never had one.

        Raises:
            Error: Nothing has been enqueued, and no program runs that could: in the thread that
                made the queue. Or the program has failed that ``timeout`` waits for.
            UsageTimeoutError: Time is up, and the programs still run. All elements stay.
        """
        self._process.check()
        if wait_for_completion:
            self._wait_for_runs(timeout, "dequeue")
        elif timeout is not None:
            self._wait_for_element(timeout)
        native = self._native
        if native is None:
            return self._nothing_yet()
        if self._synthetic:
            return self._synthetic_elements()
        idle = self._runs.num_active == 0
        count, tensors = native.take(-1)
        if idle:
            self._runs.mark_followed()
        if count == 0 and self._mode == OutfeedMode.LAST:
            return self._nothing_yet()
        return self._structure.build(tensors)

    def poll(self) -> Any:
        """Return the oldest element (``LAST``: the newest), or None if there is none; never waits.

        With ``ALL`` it is removed. The tensors have no axis for the number of elements.
        """
        self._process.check()
        native = self._native
        if native is None or self._synthetic:
            return None
        count, tensors = native.take(1)
        if count == 0:
            return None
        if self._mode == OutfeedMode.ALL:
            tensors = [tensor.squeeze(0) for tensor in tensors]
        return self._structure.build(tensors)

    def get(self, timeout: float | None = None) -> Any:
        """Return the oldest element (``LAST``: the newest), as soon as there is one.

        Args:
            timeout: The longest time to wait (seconds); None for any time.

        Raises:
            UsageTimeoutError: Time is up.
            Error: Everything is read, and the queue is closed or the program has failed: the
                program's own error.
        """
        deadline = _deadline(timeout)
        while True:
            if self._wait_for_element(_left(deadline)):
                # Another reader may have been faster.
                element = self.poll()
                if element is not None:
                    return element
            elif self._closed:
                raise Error("OutfeedQueue.get: the queue is closed, and everything is read.")
            elif deadline is not None and time.monotonic() >= deadline:
                raise UsageTimeoutError(
                    f"OutfeedQueue.get: there was no element for {timeout} seconds."
                )

    def drain(self, timeout: float | None = None) -> Any:
        """Wait for the end of the programs that feed the queue, and return what is there.

        Args:
            timeout: The longest time to wait (seconds); None for any time.

        Returns:
            As :meth:`dequeue`; an empty list if there has never been anything.

        Raises:
            UsageTimeoutError: Time is up. All elements stay.
        """
        self._wait_for_runs(timeout, "drain")
        return [] if self._native is None else self.dequeue()

    def follow(self, timeout: float | None = None, until: str = "run") -> Iterator[Any]:
        """Yield elements one at a time as they arrive.

        Args:
            timeout: The longest time to wait for each (seconds); None for any time.
            until: ``"run"`` waits for a program that feeds the queue, and ends with it, when
                everything is read. A run that has ended counts where nobody has followed it to its
                end. ``"close"`` goes on to further runs until :meth:`close`.

        Yields:
            Elements without the axis of :meth:`dequeue`.

        Raises:
            Error: The queue keeps the newest element only; or the program has failed: its own
                error, behind the last element.
            UsageTimeoutError: Time is up.
        """
        self._check_is_all("follow")
        if until not in ("run", "close"):
            raise Error(f"OutfeedQueue.follow: until must be 'run' or 'close', got {until!r}.")
        if timeout is not None:
            _deadline(timeout)  # checks it
        return self._follow(timeout, until)

    def __iter__(self) -> Iterator[Any]:
        """Yield the elements that are there, one at a time; end where there is none; never wait."""
        self._check_is_all("iteration")
        if self._native is None:
            self._nothing_yet()
        return self._what_is_there()

    def __aiter__(self) -> AsyncIterator[Any]:
        """Yield elements as :meth:`follow` does, and let other tasks run in between."""
        self._check_is_all("async iteration")
        return self._follow_async()

    # The life of a queue

    def close(self) -> None:
        """Take no more elements: a program that enqueues fails. What is there can be read."""
        with self._lock:
            self._closed = True
            if self._native is not None:
                self._native.close()
        with self._runs.changed:
            self._runs.changed.notify_all()

    @property
    def deleter(self) -> Any:
        """Close the queue; so does calling what this returns."""
        self.close()
        return self.close

    def __exit__(self, *_: object) -> None:
        """Close the queue."""
        self.close()

    def statistics(self) -> dict[str, float]:
        """Return counters.

        Returns:
            ``enqueued``, ``dequeued``: elements. ``bytes``, ``peak_bytes``: of the elements that
            nobody has read, now and at most. ``waits``, ``seconds_waited``: how often and how long
            programs waited for a reader.
        """
        if self._native is None:
            names = ("enqueued", "dequeued", "bytes", "peak_bytes", "waits", "seconds_waited")
            return dict.fromkeys(names, 0)
        return self._native.statistics()

    def __repr__(self) -> str:
        found = self.statistics()
        waited = f", programs waited {found['seconds_waited']:.3g} s" if found["waits"] else ""
        return (
            f"OutfeedQueue({self._mode.name}, {found['enqueued']} enqueued, "
            f"{found['dequeued']} dequeued, {found['bytes']} bytes held, at most "
            f"{found['peak_bytes']}{waited}{', closed' if self._closed else ''})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> OutfeedQueue:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process gets an empty queue that is made alike.
        return OutfeedQueue, (self._mode, self._buffer_depth, self._max_bytes, self._when_full)

    # Internals

    def _what_is_there(self) -> Iterator[Any]:
        while True:
            idle = self._runs.num_active == 0
            element = self.poll()
            if element is None:
                if idle:
                    self._runs.mark_followed()
                return
            yield element

    def _check_open(self, call: str) -> None:
        self._process.check()
        if self._closed:
            raise Error(f"OutfeedQueue.{call}: the queue is closed. Make another one.")

    def _check_is_all(self, what: str) -> None:
        self._process.check()
        if self._mode != OutfeedMode.ALL:
            raise Error(
                f"OutfeedQueue: {what} needs a queue that keeps all elements, and this one keeps "
                "the newest one. Make it with OutfeedMode.ALL, or call dequeue()."
            )

    def _nothing_yet(self) -> list[Any]:
        """Return what a reader gets from a queue that never had an element, or raise an Error."""
        if threading.get_ident() == self._maker and self._runs.num_active == 0:
            raise Error(
                "OutfeedQueue: nothing has been enqueued yet. Call the poptorch.function or the "
                "model that enqueues first. Where another thread calls it, use queue.poll(), "
                "queue.get(timeout) or queue.follow()."
            )
        return []

    def _synthetic_elements(self) -> Any:
        if self._mode == OutfeedMode.LAST:
            raise Error(
                "OutfeedQueue: there is no last element, as the program runs with synthetic data. "
                "Call options.disableSyntheticData()."
            )
        return self._structure.build(
            [torch.empty((0, *shape), dtype=dtype) for dtype, shape in self._components]
        )

    def _wait_briefly(self, seconds: float) -> bool:
        """Wait for an element for a moment; return whether there is one."""
        seconds = min(seconds, _SECONDS_PER_WAIT)
        native = self._native
        if native is not None and not self._synthetic:
            return native.wait(seconds)
        with self._runs.changed:
            self._runs.changed.wait(seconds)
        return False

    def _wait_for_element(self, timeout: float | None) -> bool:
        """Wait for an element; return whether there is one.

        Ends before time is up when the queue is closed; raises the error of a run that has failed.
        """
        self._process.check()
        deadline = _deadline(timeout)
        while True:
            idle, closed, failure = self._state()
            # Asked behind the state: what the last run has enqueued is there then.
            if self._wait_briefly(0):
                return True
            if idle and failure is not None:
                raise failure
            left = _left(deadline)
            if closed or (left is not None and left <= 0):
                return False
            self._wait_briefly(_SECONDS_PER_WAIT if left is None else left)

    def _state(self) -> tuple[bool, bool, BaseException | None]:
        """Return whether no program runs, whether the queue is closed, and the last failure."""
        runs = self._runs
        with runs.changed:
            return runs.num_active == 0, self._closed, runs.failure

    def _wait_for_runs(self, timeout: float | None, call: str) -> None:
        self._process.check()
        deadline = _deadline(timeout)
        runs = self._runs
        with runs.changed:
            while runs.num_active:
                left = _left(deadline)
                if left is not None and left <= 0:
                    raise UsageTimeoutError(
                        f"OutfeedQueue.{call}: the program still runs after {timeout} seconds."
                    )
                runs.changed.wait(left)

    def _follow(self, timeout: float | None, until: str) -> Iterator[Any]:
        deadline, seen_run = _deadline(timeout), False
        while True:
            more, seen_run = self._goes_on(seen_run, until)
            element = self.poll()
            if element is not None:
                yield element
                deadline = _deadline(timeout)
                continue
            if not more:
                self._end_following()
                return
            left = _left(deadline)
            if left is not None and left <= 0:
                raise UsageTimeoutError(
                    f"OutfeedQueue.follow: there was no element for {timeout} seconds."
                )
            self._wait_briefly(_SECONDS_PER_WAIT if left is None else left)

    async def _follow_async(self) -> AsyncIterator[Any]:
        seen_run = False
        while True:
            more, seen_run = self._goes_on(seen_run, "run")
            element = self.poll()
            if element is not None:
                yield element
                await asyncio.sleep(0)
                continue
            if not more:
                self._end_following()
                return
            await asyncio.to_thread(self._wait_briefly, _SECONDS_PER_WAIT)

    def _goes_on(self, seen_run: bool, until: str) -> tuple[bool, bool]:
        """Return whether a follower may get more than is there, and whether it has seen a run."""
        runs = self._runs
        with runs.changed:
            if self._closed and runs.num_active == 0:
                return False, seen_run
            if until == "close":
                return runs.num_active > 0 or runs.failure is None, True
            seen_run = seen_run or runs.num_active > 0 or runs.has_ended
            return runs.num_active > 0 or not seen_run, seen_run

    def _end_following(self) -> None:
        """Everything is read; raise the error of the run, if it failed."""
        failure = self._runs.failure
        self._runs.mark_followed()
        if failure is not None:
            raise failure


def _deadline(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise Error(f"OutfeedQueue: timeout must be seconds, 0 or more, or None, got {timeout!r}.")
    return time.monotonic() + timeout


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
