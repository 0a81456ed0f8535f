"""The thread that fills a queue's ring in advance of the program, and the first element."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from popsim_torch import _native
from popsim_torch.arguments.integers import warn_of_wide_integers
from popsim_torch.dtypes import held_dtype
from popsim_torch.errors import Error, UsageTypeError
from popsim_torch.feeds.structure import Component, Structure, as_tensor, describe, flatten

__all__ = ["ElementKind", "Producer"]

# How long a push waits for a slot before it checks whether the thread should stop.
_SECONDS_PER_PUSH = 0.1
_SECONDS_AT_EXIT = 2.0

_DIED = "InfeedQueue: the thread that iterates the dataset has ended, and could not say why."

# Threads, and the function that asks each to stop. A thread may outlive its producer while it
# deletes the dataset.
_living: weakref.WeakKeyDictionary[threading.Thread, threading.Event] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ElementKind:
    """The structure, dtypes and shapes that all elements of a queue have in common.

    Attributes:
        structure: The structure of an element.
        components: The dtype on the device and the shape of each tensor.
    """

    structure: Structure
    components: list[Component]

    @classmethod
    def of(
        cls, element: Any, where: str = "the element", like: Structure | None = None
    ) -> tuple[ElementKind, list[torch.Tensor]]:
        """Return the kind of an element, and its tensors as the device holds them.

        Args:
            element: An element of the dataset.
            where: The description of the element, for messages.
            like: The structure of elements, if it is known.

        Raises:
            UsageTypeError: The element contains something that is not a tensor.
        """
        structure, leaves = flatten(element, f"InfeedQueue: {where}", like)
        tensors = [
            _held(as_tensor(leaf, f"InfeedQueue: {where}{path}"), f"{where}{path}")
            for leaf, path in zip(leaves, structure.paths(), strict=True)
        ]
        components = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
        return cls(structure, components), tensors

    def tensors_of(self, element: Any, number: int) -> list[torch.Tensor]:
        """Return the tensors of a later element.

        Raises:
            Error: The element is of another kind.
        """
        simple = self._simple_tensors(element)
        if simple is not None:
            return simple
        kind, tensors = self.of(element, f"element {number}", self.structure)
        if kind != self:
            raise Error(
                f"InfeedQueue: element {number} is ({describe(kind.components, kind.structure)}), "
                f"and the first one was ({describe(self.components, self.structure)}). A program "
                "is compiled for one kind of element: leave an incomplete last batch out "
                "(drop_last=True in the DataLoader), or pad it."
            )
        return tensors

    def _simple_tensors(self, element: Any) -> list[torch.Tensor] | None:
        """Return the tensors of an element with the structure of the first one; None for others.

        Most elements have this structure. They need no new description, which would take longer
        than a small step.
        """
        leaves = self.structure.leaves_of(element)
        if leaves is None:
            return None
        for i, (leaf, (dtype, shape)) in enumerate(zip(leaves, self.components, strict=True)):
            if (
                type(leaf) is not torch.Tensor
                or leaf.layout is not torch.strided
                or leaf.is_nested
                or not leaf.is_cpu
                or leaf.requires_grad
                or leaf.is_neg()
                or leaf.is_conj()
                or leaf.shape != shape
                or not _native.fits_32_bits(leaf)
            ):
                return None
            if leaf.dtype is not dtype:
                if held_dtype(leaf.dtype) is not dtype:
                    return None
                leaf = leaf.to(dtype)
            leaves[i] = leaf.contiguous()
        return leaves


def _held(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """Return a tensor in the form that the ring needs."""
    if tensor.is_meta:
        raise UsageTypeError(f"InfeedQueue: {where} has no values (device 'meta').")
    warn_of_wide_integers(f"InfeedQueue: {where}", tensor)
    held = tensor.detach().to("cpu", held_dtype(tensor.dtype))
    return held.resolve_conj().resolve_neg().contiguous()


class Producer:
    """Iterates a dataset once, in a thread of its own, and puts its elements into a ring.

    PyTorch uses only that one thread, as in the workers of a ``DataLoader``. More threads would
    compete with those of the device for the cores.

    The producer has no reference to its queue, so the queue can be deleted.

    Args:
        items: The dataset after its first element.
        first: The tensors of the first element.
        kind: The kind of all elements.
        ring: The ring for the elements.
        can_restart: Whether the dataset can be iterated again.
        most: The largest number of elements to make; None for all.

    Attributes:
        most: As given.
        failure: The error that ended the thread, if any.
    """

    def __init__(
        self,
        items: Iterator[Any],
        first: list[torch.Tensor],
        kind: ElementKind,
        ring: _native.Infeed,
        can_restart: bool,
        most: int | None = None,
    ) -> None:
        self.most = most
        self.failure: BaseException | None = None
        self._last_words = ""
        self._number = 0  # the number of the element that is being made or pushed
        self._kind, self._ring, self._can_restart = kind, ring, can_restart
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=([items, first],), name="popsim_torch infeed", daemon=True
        )
        _living[self._thread] = self._stopped
        self._thread.start()

    def ask_to_stop(self) -> None:
        """Let the thread end when it has finished its current element."""
        self._stopped.set()

    def stop(self, seconds: float | None = None) -> None:
        """End the thread, and wait for it, at most for some time."""
        self.ask_to_stop()
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def explain(self, error: Error) -> None:
        """Make the failure the cause of the error of a program that needed another element."""
        if self.failure is None or isinstance(self.failure, Error):
            return
        if self._last_words in error.message:
            error.__cause__ = self.failure

    def _run(self, held: list[Any]) -> None:
        """Fill the ring, and always mark its end, even after an error.

        Args:
            held: The dataset after its first element, and the tensors of the first element. The
                frame keeps them in no variable: a failure keeps the frame alive, and then a loader
                would keep its workers.
        """
        self._last_words = _DIED
        try:
            _native.use_one_thread()
            wanted = self._push(held.pop())
            rest = None if self.most is None else self.most - 1
            for item in itertools.islice(held[0], rest) if wanted else ():
                if self._stopped.is_set():
                    break
                if not self._push(self._kind.tensors_of(item, self._number)):
                    break
            if self._number == self.most:
                self._stopped.set()  # later elements come from another producer
            self._last_words = _end_of_data(self._number, self._can_restart)
        except BaseException as error:
            self.failure = error
            self._last_words = failure_text(error, self._number)
        finally:
            held.clear()
            # A program may be waiting; but leave the ring alone if another thread fills it now.
            if not self._stopped.is_set():
                self._ring.end(self._last_words)

    def _push(self, tensors: list[torch.Tensor]) -> bool:
        """Put an element into the ring; return False if the thread should stop."""
        while not self._ring.push(tensors, _SECONDS_PER_PUSH):
            if self._stopped.is_set() or self._ring.closed:
                return False
        self._number += 1
        return True


def failure_text(error: BaseException, number: int) -> str:
    """Return the message for an element that could not be made, for any kind of error."""
    if isinstance(error, Error):
        return _as_utf8(error.message)
    try:
        said = str(error)
    except BaseException as of_text:  # SystemExit as well: the thread has to report something
        said = f"(its message cannot be shown: __str__ raises {type(of_text).__name__})"
    return _as_utf8(
        f"InfeedQueue: the dataset failed at element {number} (counted from 0): "
        f"{type(error).__name__}: {said}"
    )


def _as_utf8(text: str) -> str:
    """Return a string that C++ can read: a file name may contain bytes that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def _end_of_data(count: int, can_restart: bool) -> str:
    advice = (
        "Make the queue with repeat=True, which starts again at the end, call queue.reset() "
        "between runs, or run fewer iterations."
        if can_restart
        else "Give the queue more data, or run fewer iterations."
    )
    return (
        f"InfeedQueue: the end of the dataset was reached: the program asks for element {count} "
        f"(counted from 0), and the dataset has {count}. {advice}"
    )


def _stop_all() -> None:
    """End all threads: they must not run after the interpreter has shut down."""
    threads = list(_living.items())
    for _, stopped in threads:
        stopped.set()
    deadline = time.monotonic() + _SECONDS_AT_EXIT
    for thread, _ in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def make_stopper(producer: Producer, ring: _native.Infeed) -> Callable[[], None]:
    """Return a function that ends a queue's thread when the queue is deleted."""
    process = os.getpid()

    def stop() -> None:
        # A forked process does not have this thread, but may have locks that the thread held.
        if os.getpid() == process:
            producer.ask_to_stop()
            ring.close()

    return stop


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_living.clear)
