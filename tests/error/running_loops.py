"""The helpers for tests of faults in running loops: programs, readers, and data with a set pace."""

import gc
import queue
import threading
import time

import pytest
import torch

import popsim_torch as poptorch

SECONDS = 30.0  # longer than anything takes here
FOREVER = 10**9


def passing(infeed, outfeed, iterations, **settings):
    """Return a function that enqueues the elements of a queue."""

    @poptorch.function(**settings)
    def program():
        poptorch.repeat(iterations, lambda x: outfeed.enqueue(x), infeed=infeed)

    return program


def counting(outfeed, iterations, make=lambda count: count):
    """Return a function that enqueues ``make(0)``, ``make(1)``, ..."""

    @poptorch.function
    def program():
        def body(count):
            outfeed.enqueue(make(count))
            return count + 1

        return poptorch.repeat(iterations, body, inputs=0)

    return program


def numbers(count):
    """Return 0.0, 1.0, ..."""
    return [float(i) for i in range(count)]


class Gate:
    """A dataset of 0.0, 1.0, ... that gives out elements only when the test allows it."""

    def __init__(self):
        self._orders = queue.Queue()
        self._next = 0
        self.let(1)

    def let(self, count):
        """Allow this number of further elements."""
        for _ in range(count):
            self._orders.put(None)

    def fail(self, error):
        """Raise an error after the allowed elements."""
        self._orders.put(error)

    def end(self):
        """End the data after the allowed elements."""
        self._orders.put(StopIteration())

    def __iter__(self):
        return self

    def __next__(self):
        order = self._orders.get()
        if order is not None:
            raise order
        self._next += 1
        return torch.tensor(self._next - 1.0)


class Job(threading.Thread):
    """Runs a function in another thread, and returns its result or its error."""

    def __init__(self, work):
        super().__init__(daemon=True)
        self._work = work
        self.result = self.error = None
        self.start()

    def run(self):
        """Run the function."""
        try:
            self.result = self._work()
        except BaseException as error:
            self.error = error

    def wait(self):
        """Wait for the end of the function; return the exception that it raised."""
        self.join(SECONDS)
        assert not self.is_alive(), "the thread hangs"
        return self.error

    def value(self):
        """Wait for the function, and return its result."""
        error = self.wait()
        if error is not None:
            raise error
        return self.result


class Follower(Job):
    """A thread that follows a queue and keeps the elements as numbers."""

    def __init__(self, outfeed, **settings):
        self.elements = []
        self._outfeed, self._settings = outfeed, settings
        super().__init__(self._follow)

    def _follow(self):
        for element in self._outfeed.follow(**self._settings):
            self.elements.append(element.tolist())


def until(condition):
    """Wait until a condition is true, which should happen soon."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.001)


def own_threads():
    """Return the threads of the package and of the tests."""
    return {
        one
        for one in threading.enumerate()
        if isinstance(one, Job) or one.name.startswith("popsim_torch")
    }


@pytest.fixture
def no_thread_stays():
    """Check that all threads have ended after a test, which has closed or dropped its queues."""
    before = own_threads()
    yield
    gc.collect()
    until(lambda: own_threads() <= before)
