"""``next(iterator)`` in the body of a loop: an infeed queue reads the iterator.

A body runs once, during the trace. An element that Python took from an iterator then would be the
same in every iteration. So a queue reads each iterator that existed before the function was called,
and each iteration takes an element of the queue.
"""

from __future__ import annotations

import builtins
import gc
import itertools
import operator
import types
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch.utils.data import DataLoader

from popsim_torch.errors import Error
from popsim_torch.feeds.infeed import lasting_queue_of, queue_of, taking
from popsim_torch.private_torch.loaders import BaseDataLoaderIter
from popsim_torch.trace.books.device_loop import UnknownObject
from popsim_torch.trace.graph.origin import user_line

__all__ = ["HostIterators", "is_same_position", "position_of"]


class HostIterators:
    """The iterators that the body of a loop can use.

    Args:
        reached: The iterators that names of the body lead to.
        lasting: The iterators that existed before the function was called.
    """

    def __init__(
        self, reached: Collection[Iterator[Any]], lasting: Collection[Iterator[Any]]
    ) -> None:
        self._reached = reached
        self._lasting = lasting

    @contextmanager
    def taken_by_iterations(self) -> Iterator[None]:
        """Let ``next(iterator)`` take an element of the iterator's queue in this scope."""
        on_host = builtins.next

        def next_of_iteration(iterator: Any, *default: Any) -> Any:
            if taking.get() is None:  # another thread
                return on_host(iterator, *default)
            if any(iterator is one for one in self._reached):
                return self._next(iterator, default)
            if isinstance(iterator, BaseDataLoaderIter):
                raise Error(
                    f"next(iterator){user_line(' at ')}: the iterator of this DataLoader was not "
                    "found before the trace of the body. Name a variable for it in the body, or "
                    "pass poptorch.InfeedQueue(loader) to the loop."
                )
            return on_host(iterator, *default)

        begin = DataLoader.__iter__

        def begin_in_iteration(loader: DataLoader[Any]) -> Any:
            if taking.get() is None:
                return begin(loader)
            raise Error(
                f"The body of the loop iterates over a DataLoader{user_line(' at ')}. That would "
                "happen once, during the trace of the body. Make an iterator before the function, "
                "iterator = iter(loader), and call next(iterator) in the body; or pass "
                "poptorch.InfeedQueue(loader) to the loop."
            )

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(builtins, "next", next_of_iteration))
            stack.enter_context(mock.patch.object(DataLoader, "__iter__", begin_in_iteration))
            for kind in {type(one) for one in self._reached}:
                if isinstance(kind.__next__, types.FunctionType):
                    advance = self._not_in_iteration(kind.__next__)
                    stack.enter_context(mock.patch.object(kind, "__next__", advance))
            yield

    def _not_in_iteration(self, advance: Any) -> Any:
        """Return a method that takes an element of an iterator, but raises in the body."""

        def advance_on_host(iterator: Any) -> Any:
            if taking.get() is not None and any(iterator is one for one in self._reached):
                raise _taken_otherwise(iterator, user_line(" at "))
            return advance(iterator)

        return advance_on_host

    def _next(self, iterator: Iterator[Any], default: tuple[Any, ...]) -> Any:
        where = f"next(iterator){user_line(' at ')}"
        if default:
            raise Error(
                f"{where}: in a loop it takes no default value: the loop ends with an Error at the "
                "end of the data. Remove it, and make no more iterations than there is data."
            )
        if not any(iterator is one for one in self._lasting):
            raise Error(
                f"{where}: this {type(iterator).__name__} was made in the function, whose code "
                "runs once: later calls cannot restart it. Make it before the function, "
                "or pass poptorch.InfeedQueue(dataset) to the loop."
            )
        queue = lasting_queue_of(iterator)
        try:
            return next(queue)
        except UnknownObject as unknown:
            raise UnknownObject(queue, where) from unknown

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        """Refuse other ways to take elements of an iterator in the body, if they can be detected.

        Raises:
            Error: An element was taken in another way in this scope.
        """
        before = [(one, position_of(one)) for one in self._reached if queue_of(one) is None]
        yield
        for one, position in before:
            if queue_of(one) is None and not is_same_position(position, position_of(one)):
                raise _taken_otherwise(one, "")


def _taken_otherwise(iterator: Iterator[Any], where: str) -> Error:
    return Error(
        f"The body of the loop takes elements of a {type(iterator).__name__}{where} other than "
        "by next(iterator), for example by a `for` loop: that happened once, during the trace of "
        "the body. Call next(iterator) once in it, and let the device loop make the iterations."
    )


def position_of(iterator: Iterator[Any]) -> list[Any]:
    """Return objects that change with an iterator's position, if the position is visible."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame  # its variables, and the iterators of its `for` loops
        found = [None if frame is None else frame.f_lasti, *gc.get_referents(iterator)]
    elif isinstance(iterator, BaseDataLoaderIter):
        return [iterator._num_yielded]
    else:
        found = [_count_of(iterator)]
    inner = gc.get_referents(iterator) if type(iterator).__module__ in _BUILT_IN else []
    inner += [part for one in inner if type(one) is tuple for part in one]
    for one in inner:
        if isinstance(one, Iterator):
            found += position_of(one)
    return found


_BUILT_IN = ("builtins", "itertools")


def _count_of(iterator: Iterator[Any]) -> Any:
    if isinstance(iterator, itertools.count):
        return repr(iterator)
    try:
        return operator.length_hint(iterator)
    except Exception:  # the iterator's own code
        return None


def is_same_position(before: list[Any], after: list[Any]) -> bool:
    """Return whether no element was taken between two positions, if that is visible."""
    if len(before) != len(after):
        return False
    pairs = zip(before, after, strict=True)
    return all(a is b or (isinstance(a, (int, str)) and a == b) for a, b in pairs)
