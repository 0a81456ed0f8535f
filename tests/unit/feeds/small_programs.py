"""Programs that do little but feed queues, and data whose pace a test sets."""

import queue
import threading

import torch

import popsim_torch as poptorch
from popsim_torch.loops import function, repeat

SECONDS = 20.0  # longer than anything takes


def counting(outfeed, iterations, make=lambda count: count):
    """Return a function that enqueues what ``make`` makes of 0, 1, ..."""

    @function
    def program():
        def body(count):
            outfeed.enqueue(make(count))
            return count + 1

        return repeat(iterations, body, inputs=0)

    return program


def passing(infeed, outfeed, iterations):
    """Return a function that enqueues the elements of a queue, dictionaries as such."""

    @function
    def program():
        def body(*args, **kwargs):
            outfeed.enqueue(kwargs or (args[0] if len(args) == 1 else args))

        repeat(iterations, body, infeed=infeed)

    return program


class Gate:
    """A dataset that makes an element when it is told to.

    The first one, 0.0, is there from the start: a program is compiled for it.
    """

    def __init__(self, first=None):
        self._elements = queue.Queue()
        self.put(torch.zeros(()) if first is None else first)

    def put(self, element):
        """Let the next element be this one; None ends the data, and errors are raised."""
        self._elements.put(element)

    def __call__(self):
        """Return the elements."""
        while (element := self._elements.get()) is not None:
            if isinstance(element, BaseException):
                raise element
            yield element


class Reader(threading.Thread):
    """Runs a function in another thread, and hands over what it returns or raises."""

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
        """Return what the function returned, when it has."""
        self.join(SECONDS)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


def queues(dataset, **settings):
    """Return a pair of queues."""
    return poptorch.InfeedQueue(dataset, **settings), poptorch.OutfeedQueue()
