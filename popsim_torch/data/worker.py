"""The worker process of an ``AsynchronousDataAccessor``: iterates the data and fills the ring.

Consumer and worker share a ring of slots (``ring``) and one pipe; there are no locks, counters or
shared flags. The messages in the pipe determine which process may access a slot, and the end of the
pipe means that the other process has ended:

* worker to consumer, once: a pickled ``Start`` and the descriptor of the ring's memory;
* worker to consumer, for each element: a ``Filled`` slot, which the consumer owns from then on;
  after the last one of a pass: a ``Filled`` without a slot;
* worker to consumer, if the data raises an error: ``Failed``, and the worker ends;
* consumer to worker: the number of a slot that is free again, a ``Pass`` to request a pass, or None
  to end.

Passes are numbered from 1. The worker starts the next one by itself or on request. If a pass is
requested while an earlier one runs, the earlier one ends, and the consumer drops its elements that
are still in the pipe.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from types import TracebackType
from typing import Any, NamedTuple

import numpy
import torch

from popsim_torch.arguments.parsers import (
    ICustomArgParser,
    registerCustomArgParser,
    registered_parsers,
)
from popsim_torch.data.layout import Layout, TensorType, tensor_types
from popsim_torch.data.ring import Ring, nameless_file
from popsim_torch.errors import Error, UsageValueError
from popsim_torch.private_torch.loaders import forget_workers

__all__ = ["Failed", "Filled", "Pass", "RandomStates", "Settings", "Start", "run"]

_PARENT_CHECK_SECONDS = 1.0


class Start(NamedTuple):
    """The information that the consumer needs to read the ring."""

    layout: Layout
    types: list[TensorType]


class Filled(NamedTuple):
    """A slot that holds an element, or the end of a pass.

    If the shapes of an element differ from those of the slots, ``tensors`` has its pickled tensors,
    and the slot is only used to count the element. ``seconds_full`` says how long the worker has
    waited for free slots so far.
    """

    number: int
    slot: int | None
    tensors: bytes | None = None
    seconds_full: float = 0.0


class Failed(NamedTuple):
    """The data raised an exception."""

    text: str


class Pass(NamedTuple):
    """A request of the consumer for the n-th pass."""

    number: int


class RandomStates:
    """The states of the random number generators of the process that makes this object."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state().numpy()  # (tensors go through shared memory)
        self._python = random.getstate()
        self._numpy = numpy.random.get_state()

    def restore(self) -> None:
        """Continue with the same random numbers in this process."""
        torch.set_rng_state(torch.from_numpy(self._torch))
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)


def _start_method() -> str:
    chosen = multiprocessing.get_start_method(allow_none=True)
    return chosen or multiprocessing.get_all_start_methods()[0]  # (the first is the default)


@dataclass(frozen=True)
class Settings:
    """The information that the worker needs besides the data.

    Attributes:
        num_slots: The number of elements that fit into the ring.
        num_ahead: The number of passes to load before the consumer requests them.
        early_preload: Whether to load more than one element before the first pass is requested.
        rebatched_size: The number of samples in an element that is built from other batches, or
            None.
        keep_rest: Whether an incomplete element at the end of a pass is returned.
        any_shape: Whether the shapes of elements may differ.
        random_states: The random states of the consumer.
        parsers: The registered parsers of the consumer.
        start_method: The start method of the consumer for processes, if it has set one.
    """

    num_slots: int
    num_ahead: int
    early_preload: bool
    rebatched_size: int | None
    keep_rest: bool
    any_shape: bool
    random_states: RandomStates = field(default_factory=RandomStates)
    parsers: dict[type[Any], ICustomArgParser] = field(default_factory=registered_parsers)
    start_method: str = field(default_factory=_start_method)


def run(
    connection: Connection,
    others_end: Connection | None,
    load: Callable[[], Iterable[Any]],
    settings: Settings,
) -> None:
    """Send elements until the consumer needs no more; this is the main function of the worker.

    Args:
        connection: The worker's end of the pipe.
        others_end: The consumer's end, if this process has inherited it.
        load: Returns the data to iterate.
        settings: See :class:`Settings`.
    """
    data: Any = None
    try:
        signal.signal(signal.SIGINT, _interrupt_once)
        if others_end is not None:
            others_end.close()
        _prepare_process(settings)
        data = load()
        _Producer(connection, data, settings).run()
    except (KeyboardInterrupt, _ConsumerGoneError):
        pass
    except Exception as error:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            return  # a library may turn the interrupt into this error
        traceback.print_exc()
        sys.stderr.flush()
        with suppress(OSError):
            connection.send(Failed(f"{type(error).__name__}: {error}"))
        sys.exit(1)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if isinstance(data, torch.utils.data.DataLoader):
            # Let the workers of a loader end by themselves: a killed one may leave a named memory
            # segment.
            forget_workers(data)


def _interrupt_once(signum: int, frame: object) -> None:
    """End silently at the first Ctrl-C, and ignore further ones."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _prepare_process(settings: Settings) -> None:
    # Threads of libraries do not survive a fork, and calls that wait for them hang.
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Otherwise the workers of a loader would start as this process did: with spawn that takes
    # seconds.
    multiprocessing.set_start_method(settings.start_method, force=True)
    # These workers may be forks, because the thread of this process holds no locks.
    warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
    sys.excepthook = _report_but_lost_connections
    settings.random_states.restore()
    for kind, parser in settings.parsers.items():
        registerCustomArgParser(kind, parser)


def _report_but_lost_connections(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print no error, also in forked workers, if the process that reads a sent tensor has ended."""
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)


def _end_with_parent() -> None:
    """Kill this process and its children when the consumer dies, even while the data is loading."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # (only children run this)
    parent_pid = os.getppid()
    # Check os.getppid() as well: forks of the consumer may keep the pipe of `parent` open.
    while parent.is_alive() and os.getppid() == parent_pid:
        parent.join(_PARENT_CHECK_SECONDS)
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)


class _ConsumerGoneError(Exception):
    """The consumer has requested the end, or has died."""


class _Producer:
    """Loads elements into the slots of a ring, and sends a message to the consumer for each."""

    def __init__(self, connection: Connection, data: Iterable[Any], settings: Settings) -> None:
        self._connection = connection
        self._data = data
        self._settings = settings
        self._layout: Layout | None = None
        self._types: list[TensorType] = []
        self._slots: list[list[torch.Tensor]] = []
        self._free = deque(range(settings.num_slots))
        self._seconds_full = 0.0
        self._wanted = 0
        self._last_allowed = 1 if settings.early_preload else 0

    def run(self) -> None:
        for number in count(1):
            if self._slots:  # load the first element at once
                self._obey(number)
            self._run_pass(number)

    def _run_pass(self, number: int) -> None:
        for tensors in self._elements():
            self._deliver(number, tensors)
            self._obey(number)
            if self._wanted > number:
                return
        if not self._slots:
            raise Error(
                "AsynchronousDataAccessor: the dataset is empty, or has too few samples for one "
                "batch."
            )
        self._send(Filled(number, None, None, self._seconds_full))

    def _elements(self) -> Iterator[list[torch.Tensor]]:
        elements = self._flat_elements()
        size = self._settings.rebatched_size
        return elements if size is None else _rebatched(elements, size, self._settings.keep_rest)

    def _flat_elements(self) -> Iterator[list[torch.Tensor]]:
        for element in self._data:
            if self._layout is None:
                self._layout = Layout(element)
            yield self._layout.flatten(element)

    def _deliver(self, number: int, tensors: list[torch.Tensor]) -> None:
        types = tensor_types(tensors)
        if not self._slots:
            assert self._layout is not None  # (it has flattened the element)
            self._start(self._layout, types)
        pickled = None if types == self._types else self._pickled(tensors, types)
        self._wait_for_slot()
        slot = self._free.popleft()
        if pickled is None:
            with torch.no_grad():
                for target, tensor in zip(self._slots[slot], tensors, strict=True):
                    target.copy_(tensor)
        self._send(Filled(number, slot, pickled, self._seconds_full))

    def _wait_for_slot(self) -> None:
        if self._free:
            return
        began = time.monotonic()
        while not self._free:
            self._receive()
        self._seconds_full += time.monotonic() - began

    def _pickled(self, tensors: list[torch.Tensor], types: list[TensorType]) -> bytes:
        """Return the pickled tensors of an element that does not fit a slot, if that is allowed."""
        is_rest = self._settings.rebatched_size is not None  # (others have the right size)
        if not is_rest and not self._settings.any_shape:
            raise UsageValueError(
                f"AsynchronousDataAccessor: the tensors of an element are {_show(types)}, those of "
                f"the first one are {_show(self._types)}. All elements must have the same dtypes "
                "and shapes; drop_last=True leaves out a shorter last batch, rebatched_size joins "
                "batches to one size."
            )
        # (the pickle of a view contains all of the memory behind it)
        return pickle.dumps([tensor.detach().clone() for tensor in tensors])

    def _start(self, layout: Layout, types: list[TensorType]) -> None:
        size = self._settings.rebatched_size
        if size is not None:
            types = [TensorType(dtype, (size, *shape[1:])) for dtype, shape in types]
        self._types = types
        file = nameless_file()
        ring = Ring(types, self._settings.num_slots, file)
        self._slots = [ring.tensors(slot) for slot in range(self._settings.num_slots)]
        # Do not use the connection's own pickler, which would share the memory of tensors.
        self._send(pickle.dumps(Start(layout, types)))
        send_handle(self._connection, file, os.getppid())
        os.close(file)

    def _obey(self, number: int) -> None:
        """Read the messages of the consumer; wait for more while this pass may not continue."""
        while self._connection.poll() or number > self._last_allowed:
            self._receive()

    def _receive(self) -> None:
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            message = None
        if message is None:
            raise _ConsumerGoneError
        if isinstance(message, Pass):
            self._wanted = message.number
            self._last_allowed = message.number + self._settings.num_ahead
        else:
            self._free.append(message)

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise _ConsumerGoneError from None


def _rebatched(
    chunks: Iterable[list[torch.Tensor]], size: int, keep_rest: bool
) -> Iterator[list[torch.Tensor]]:
    """Yield batches of one size; each must be read before the next one is requested."""
    batch: list[torch.Tensor] = []
    num_rows = 0
    for chunk in chunks:
        if not batch:
            batch = [_grown(tensor, size) for tensor in chunk]
        num_left = _common_rows(chunk, batch)
        while num_left:
            num_taken = min(num_left, size - num_rows)
            for target, tensor in zip(batch, chunk, strict=True):
                start = len(tensor) - num_left
                target[num_rows : num_rows + num_taken] = tensor.detach()[start : start + num_taken]
            num_left -= num_taken
            num_rows += num_taken
            if num_rows == size:
                yield batch
                num_rows = 0
    if num_rows and keep_rest:
        yield [tensor[:num_rows] for tensor in batch]


def _grown(tensor: torch.Tensor, size: int) -> torch.Tensor:
    if tensor.dim() == 0:
        raise UsageValueError(
            "AsynchronousDataAccessor: a batch holds a tensor without dimensions, which cannot be "
            "rebatched. Tensors need their samples in dimension 0."
        )
    return torch.empty((size, *tensor.shape[1:]), dtype=tensor.dtype)


def _common_rows(chunk: list[torch.Tensor], batch: list[torch.Tensor]) -> int:
    """Return the number of samples in a chunk, and check that it can be joined to a batch."""
    for tensor, target in zip(chunk, batch, strict=True):
        if (
            tensor.dtype is not target.dtype
            or tensor.dim() == 0
            or tensor.shape[1:] != target.shape[1:]
            or len(tensor) != len(chunk[0])
        ):
            raise UsageValueError(
                f"AsynchronousDataAccessor: a batch with tensors {_show(tensor_types(chunk))} "
                f"cannot be joined to {_show(tensor_types(batch))}. All tensors must have the same "
                "number of samples in dimension 0, and nothing else may change between batches."
            )
    return len(chunk[0]) if chunk else 0


def _show(types: list[TensorType]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in types)
