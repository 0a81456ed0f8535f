"""Small programs that feed queues, and data that come when a test allows it."""

import queue
import threading

import torch

import popsim_torch as poptorch
from popsim_torch.loops import function, repeat

SECONDS = 20.0  # longer than anything takes here


def counting(outfeed, iterations, make=lambda count: count):
    """Return a function that enqueues ``make(0)``, ``make(1)``, ..."""

    @function
    def program():
        def body(count):
            outfeed.enqueue(make(count))
            return count + 1

        return repeat(iterations, body, inputs=0)

    return program


def passing(infeed, outfeed, iterations):
    """Return a function that enqueues the elements of a queue; dictionaries stay dictionaries."""

    @function
    def program():
        def body(*args, **kwargs):
            outfeed.enqueue(kwargs or (args[0] if len(args) == 1 else args))

        repeat(iterations, body, infeed=infeed)

    return program


class Gate:
    """A dataset that gives out an element when the test allows it.

    The first element, 0.0, can be read at once: a program is compiled for it.
    """

    def __init__(self, first=None):
        self._elements = queue.Queue()
        self.put(torch.zeros(()) if first is None else first)

    def put(self, element):
        """Set the next element; None ends the data, and an exception is raised."""
        self._elements.put(element)

    def __call__(self):
        """Return the elements."""
        while (element := self._elements.get()) is not None:
            if isinstance(element, BaseException):
                raise element
            yield element


class Reader(threading.Thread):
    """Runs a function in another thread, and returns its result or its error."""

    def __init__(self, read):
        super().__init__(daemon=True)
        self._read = read
        self.result = self.error = None
        self.start()

    def run(self):
        """Run the function."""
        try:
            self.result = self._read()
        except BaseException as error:
            self.error = error

    def value(self):
        """Wait for the function, and return its result."""
        self.join(SECONDS)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


def queues(dataset, **settings):
    """Return a pair of queues."""
    return poptorch.InfeedQueue(dataset, **settings), poptorch.OutfeedQueue()
