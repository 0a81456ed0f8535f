"""The reading side of an ``OutfeedQueue``: taking elements, and waiting for them."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch

from popsim_torch._native import Outfeed
from popsim_torch.enums import NamedIntEnum, explain_members
from popsim_torch.errors import Error, UsageTimeoutError
from popsim_torch.feeds.checks import OneProcess
from popsim_torch.feeds.runs import Runs
from popsim_torch.feeds.structure import Component, Structure
from popsim_torch.ops import op_listener

__all__ = ["OutfeedMode", "QueueReader"]

# A wait consists of parts of this length; Ctrl-C and the end of a run are noticed in between.
_SECONDS_PER_WAIT = 0.05


class OutfeedMode(NamedIntEnum):
    """Which elements an ``OutfeedQueue`` keeps."""

    ALL = 0
    """All of them, in order, until they are read."""
    LAST = 1
    """The newest one."""


class QueueReader:
    """The methods of an ``OutfeedQueue`` for readers, in any thread.

    Args:
        mode: Which elements the queue keeps.
    """

    def __init__(self, mode: OutfeedMode) -> None:
        self._mode = mode
        self._process = OneProcess("OutfeedQueue")
        self._maker = threading.get_ident()
        self._runs = Runs()
        # Set when a program that feeds the queue is compiled.
        self._native: Outfeed | None = None
        self._structure = Structure()
        self._components: list[Component] = []
        self._synthetic = self._closed = False

    @property
    def mode(self) -> OutfeedMode:
        """Which elements the queue keeps."""
        return self._mode

    @property
    def enqueued(self) -> bool:
        """Whether there is a compiled program that enqueues to the queue; for any thread."""
        return self._native is not None

    def why_empty(self) -> str:
        """Return why nothing was ever enqueued, as a sentence; empty if a program can enqueue."""
        if self._native is not None:
            return ""
        if self._closed:
            return "The queue was closed before a program that enqueues to it was compiled."
        return (
            "No compiled program enqueues to this queue: is another queue fed, or did nothing run "
            "yet?"
        )

    def dequeue(self, wait_for_completion: bool = False, *, timeout: float | None = None) -> Any:
        """Return the elements that have arrived; with ``ALL`` they are removed.

        In a thread other than the one that runs the program, there may be none yet.

        Args:
            wait_for_completion: Whether to wait for the end of the programs that feed the queue and
                run now.
            timeout: The longest time to wait for the first element (seconds); None does not wait.
                With ``wait_for_completion`` the longest time to wait for the end of the programs.

        Returns:
            ``ALL``: an element whose tensors have a new first axis, with the number of elements as
            its size. ``LAST``: the newest element. An empty list if the queue has never had one.

        Raises:
            Error: Nothing has been enqueued, and no running program could do so; only in the thread
                that made the queue. Or the program that ``timeout`` waits for has failed.
            UsageTimeoutError: The time is up, and the programs still run. All elements stay in the
                queue.
        """
        self._check_reader()
        if wait_for_completion:
            self._wait_for_runs(timeout, "dequeue")
        elif timeout is not None:
            self._wait_for_element(timeout)
        found = self._take_all()
        return self._nothing_yet() if found is None else found

    def poll(self) -> Any:
        """Return the oldest element (``LAST``: the newest), or None if there is none; never waits.

        With ``ALL`` it is removed. The tensors have no axis for the number of elements.
        """
        self._check_reader()
        native = self._native
        if native is None or self._synthetic:
            return None
        tensors = native.take_one()
        return self._structure.build(tensors) if tensors else None

    def get(self, timeout: float | None = None) -> Any:
        """Return the oldest element (``LAST``: the newest), and wait for it if there is none yet.

        Args:
            timeout: The longest time to wait (seconds); None for any time.

        Raises:
            UsageTimeoutError: Time is up.
            Error: All elements are read, and the queue is closed, or the program has failed; then
                it is the error of the program.
        """
        deadline = _deadline(timeout)
        while True:
            if self._synthetic:
                raise Error(
                    "OutfeedQueue.get: no element will come, as the program runs with synthetic "
                    "data. Call options.disableSyntheticData()."
                )
            if self._wait_for_element(_left(deadline)):
                # Another reader may have taken the element first.
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
        """Wait for the end of the programs that feed the queue, and return the elements.

        Args:
            timeout: The longest time to wait (seconds); None for any time.

        Returns:
            As :meth:`dequeue`; an empty list if there has never been an element.

        Raises:
            UsageTimeoutError: The time is up. All elements stay in the queue.
        """
        self._wait_for_runs(timeout, "drain")
        found = self._take_all()
        return [] if found is None else found

    def follow(self, timeout: float | None = None, until: str = "run") -> Iterator[Any]:
        """Yield elements one at a time as they arrive.

        Args:
            timeout: The longest time to wait for each (seconds); None for any time.
            until: ``"run"`` waits for a program that feeds the queue, and stops after that run,
                when all elements are read. A run that has already ended is used if no reader has
                followed it to its end. ``"close"`` continues with further runs until :meth:`close`.

        Yields:
            Elements without the axis of :meth:`dequeue`.

        Raises:
            Error: The queue keeps only the newest element; or the program has failed: then it is
                the program's error, after the last element.
            UsageTimeoutError: The time is up.
        """
        self._check_is_all("follow")
        if until not in ("run", "close"):
            raise Error(f"OutfeedQueue.follow: until must be 'run' or 'close', got {until!r}.")
        if timeout is not None:
            _deadline(timeout)  # checks the value
        return self._follow(timeout, until)

    def __iter__(self) -> Iterator[Any]:
        """Yield the present elements, one at a time, and stop if there is none; never wait."""
        self._check_is_all("iteration")
        if self._native is None:
            self._nothing_yet()
        return self._what_is_there()

    def __aiter__(self) -> AsyncIterator[Any]:
        """Yield elements as :meth:`follow` does, and let other async tasks run in between."""
        self._check_is_all("async iteration")
        return self._follow_async()

    # Internals

    def _take_all(self) -> Any:
        """Return the present elements, or None if there has never been an element."""
        native = self._native
        if native is None:
            return None
        if self._synthetic:
            return self._synthetic_elements()
        idle = self._runs.num_active == 0
        count, tensors = native.take(-1)
        if idle:
            self._runs.mark_followed()
        if count == 0 and self._mode == OutfeedMode.LAST:
            return None
        return self._structure.build(tensors)

    def _what_is_there(self) -> Iterator[Any]:
        while True:
            idle = self._runs.num_active == 0
            element = self.poll()
            if element is None:
                if idle:
                    self._runs.mark_followed()
                return
            yield element

    def _check_reader(self) -> None:
        self._process.check()
        if op_listener.get() is not None:
            raise Error(
                "OutfeedQueue: the queue is read in the body of a loop, or in forward: this code "
                "runs only once, while the program is traced and has no element yet. Read it "
                "after the call that runs the program, or in another thread."
            )

    def _check_is_all(self, what: str) -> None:
        self._check_reader()
        if self._mode != OutfeedMode.ALL:
            raise Error(
                f"OutfeedQueue: {what} needs a queue that keeps all elements, and this one keeps "
                "the newest one. Make it with OutfeedMode.ALL, or call dequeue()."
            )

    def _nothing_yet(self) -> list[Any]:
        """Return the result for a queue that never had an element, or raise an Error."""
        if threading.get_ident() == self._maker and self._runs.num_active == 0:
            raise Error(
                "OutfeedQueue: nothing has been enqueued yet. Call the poptorch.function or the "
                "model that enqueues first. If another thread calls it, use queue.poll(), "
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
        """Wait for an element for a short time; return whether there is one."""
        seconds = min(seconds, _SECONDS_PER_WAIT)
        native = self._native
        if native is not None and not self._synthetic:
            return native.wait(seconds)
        with self._runs.changed:
            self._runs.changed.wait(seconds)
        return False

    def _wait_for_element(self, timeout: float | None) -> bool:
        """Wait for an element; return whether there is one.

        The wait ends early if the queue is closed. If a run has failed, its error is raised.
        """
        self._check_reader()
        deadline = _deadline(timeout)
        while True:
            idle, closed, failure = self._state()
            # Check this after the state: all elements of the last run are in the queue by then.
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
        self._check_reader()
        deadline = _deadline(timeout)
        runs = self._runs
        with runs.changed:
            while runs.num_active:
                left = _left(deadline)
                if left is not None and left <= 0:
                    raise UsageTimeoutError(
                        f"OutfeedQueue.{call}: the program still runs after {timeout} seconds."
                    )
                runs.changed.wait(
                    _SECONDS_PER_WAIT if left is None else min(left, _SECONDS_PER_WAIT)
                )

    def _follow(self, timeout: float | None, until: str) -> Iterator[Any]:
        deadline, seen_run = _deadline(timeout), False
        while True:
            element = self.poll()
            if element is None:
                more, seen_run = self._goes_on(seen_run, until)
                # If the last run has ended, all its elements are in the queue now.
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
            element = self.poll()
            if element is None:
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
        """Return whether more elements may come for a follower, and whether it has seen a run."""
        runs = self._runs
        with runs.changed:
            if self._closed and runs.num_active == 0:
                return False, seen_run
            if until == "close":
                return runs.num_active > 0 or runs.failure is None, True
            seen_run = seen_run or runs.num_active > 0 or runs.has_ended
            return runs.num_active > 0 or not seen_run, seen_run

    def _end_following(self) -> None:
        """Note that all elements are read, and raise the error of the run if it failed."""
        failure = self._runs.failure
        self._runs.mark_followed()
        if failure is not None:
            raise failure


def _deadline(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise Error(f"OutfeedQueue: timeout must be seconds, 0 or more, or None, got {timeout!r}.")
    return None if timeout == math.inf else time.monotonic() + timeout


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


explain_members(__name__)
