"""``OutfeedQueue``: brings tensors out of a program while it runs."""

from __future__ import annotations

import functools
import math
import os
import tempfile
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from popsim_torch import _native
from popsim_torch.dtypes import dtype_name
from popsim_torch.errors import Error
from popsim_torch.feeds.checks import check_integer, check_placement, check_seconds
from popsim_torch.feeds.reading import OutfeedMode, QueueReader
from popsim_torch.feeds.structure import Component, Structure, as_tensor, describe, flatten
from popsim_torch.ops import op_listener
from popsim_torch.queue_state import QueueState
from popsim_torch.tables import Described

__all__ = ["OutfeedMode", "OutfeedQueue"]

_WHEN_FULL = ("wait", "raise", "drop_oldest", "drop_newest", "spill")
_PATIENCE = 60.0
_COUNTERS = (
    *("enqueued", "dequeued", "bytes", "peak_bytes"),
    *("dropped", "spilled", "waits", "seconds_waited", "ready"),
)


class OutfeedQueue(QueueReader, Described, AbstractContextManager["OutfeedQueue"]):
    """Brings tensors from a running program to the host.

    The program never waits for Python: it writes elements to memory of the queue, and readers take
    them from there, in any thread. If there are several readers, each element goes to one of them.
    A copy of a model that has a queue uses the same queue.

    Args:
        mode: Which elements to keep. With ``LAST``, which has memory for two and is never full,
            ``buffer_depth``, ``max_bytes`` and ``when_full`` have no effect.
        buffer_depth: The number of elements for which memory is allocated at the start (1 or more).
            If readers are slow, more memory is allocated.
        max_bytes: The largest amount of memory for unread elements (bytes); None for no limit.
            There is always memory for one element.
        when_full: What happens when ``max_bytes`` is used up: ``"wait"`` makes the program wait for
            a reader, ``"raise"`` ends it with an Error; ``"drop_oldest"`` drops the oldest unread
            element, ``"drop_newest"`` the new element; ``"spill"`` writes elements to files in the
            folder for temporary files, which have no name and are deleted when the process ends.
        patience: How long a program waits while no reader reads, before it ends with an Error
            (seconds); None for no limit.
        every: Keep only the last of each group of this many enqueued elements: with 3, those of the
            iterations 2, 5, 8, ... Skipped elements cost nothing.
        device_ordinal: Where real hardware runs the program; no effect here.
        optimise_latency: How real hardware moves elements; no effect here.
        replication_factor: The number of copies of the model. It is known from the model: another
            number than 1 is checked when a program is connected. With several copies, each tensor
            of an element has a first axis for them.

    Raises:
        Error: An argument has a wrong value.
    """

    def __init__(
        self,
        mode: OutfeedMode = OutfeedMode.ALL,
        buffer_depth: int = 3,
        max_bytes: int | None = None,
        when_full: str = "wait",
        *,
        patience: float | None = _PATIENCE,
        every: int = 1,
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
        if when_full not in _WHEN_FULL:
            raise Error(
                f"{where}: when_full must be one of {', '.join(map(repr, _WHEN_FULL))}, got "
                f"{when_full!r}."
            )
        if max_bytes is None and when_full not in _WHEN_FULL[:2]:
            raise Error(
                f"{where}: when_full={when_full!r} needs max_bytes: without it the queue is never "
                "full."
            )
        if patience is not None:
            check_seconds(where, "patience", patience)
        check_integer(where, "every", every, 1)
        check_placement(where, device_ordinal, optimise_latency)
        self._replicas = check_integer(where, "replication_factor", replication_factor, 1)
        super().__init__(mode)
        self._buffer_depth, self._every = buffer_depth, every
        self._max_bytes, self._when_full = max_bytes, when_full
        self._patience = patience
        self._lock = threading.Lock()
        self._source = self._shown_name = ""

    # Methods that programs call

    def enqueue(self, x: Any) -> None:
        """Put an element into the queue, each time the program runs this line.

        Args:
            x: A tensor or number, or a tuple, list or dictionary of these, which may be nested. The
                structure must be the same in each trace of forward or of the body of a loop.

        Raises:
            Error: No program is being traced, or the program already enqueues to this queue.
            UsageTypeError: The element contains something else.
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
        replicas: int = 1,
    ) -> _native.Outfeed:
        """Return the native queue to which a compiled program writes its elements.

        Args:
            structure: The structure of the elements.
            components: The dtype and shape of each tensor, as it is returned.
            source: The line that enqueues.
            synthetic: Whether the values have no meaning, and may not be read.
            replicas: The number of the program's replicas.

        Raises:
            Error: Elements of another program have another structure, the queue is for another
                number of replicas, or it is closed.
        """
        if self._replicas not in (1, replicas):
            raise Error(
                f"OutfeedQueue(replication_factor={self._replicas}): the program that enqueues at "
                f"{source} has {replicas} replicas. Leave the argument out, or set "
                f"Options.replicationFactor({self._replicas})."
            )
        self._check_open("enqueue")
        components = [(dtype, tuple(shape)) for dtype, shape in components]
        with self._lock:
            if self._native is None:
                self._native = _native.Outfeed(
                    [dtype_name(dtype) for dtype, _ in components],
                    [shape for _, shape in components],
                    synthetic or self._mode == OutfeedMode.LAST,
                    self._every,
                    self._buffer_depth,
                    -1 if self._max_bytes is None else self._max_bytes,
                    self._when_full,
                    math.inf if self._patience is None else float(self._patience),
                    tempfile.gettempdir() if self._when_full == "spill" else "",
                    f"{describe(components, structure)} enqueued at {source}",
                )
                self._structure, self._components = structure, components
                self._source, self._synthetic = source, synthetic
            elif (structure, components) != (self._structure, self._components):
                raise Error(
                    f"OutfeedQueue: the element enqueued at {source} is "
                    f"({describe(components, structure)}), and the queue has elements "
                    f"({describe(self._components, self._structure)}) from {self._source}. All "
                    "elements of a queue are alike: make another queue for "
                    "these."
                )
            return self._native

    def _begin_run(self) -> None:
        """Note that a program which feeds the queue begins to run, or to be compiled."""
        self._process.check()
        self._runs.begin()

    def _end_run(self, error: BaseException | None) -> None:
        """Note that the program has ended, with an error if it failed."""
        self._runs.end(error)
        if self._native is not None:
            self._native.wake()

    # End and state of a queue

    def close(self) -> None:
        """Accept no more elements: a program that enqueues fails. Present elements can be read."""
        with self._lock:
            self._closed = True
            if self._native is not None:
                self._native.close()
        with self._runs.changed:
            self._runs.changed.notify_all()

    @property
    def deleter(self) -> Any:
        """Close the queue; calling the result does the same."""
        self.close()
        return self.close

    def __exit__(self, *_: object) -> None:
        """Close the queue."""
        self.close()

    def statistics(self) -> dict[str, float]:
        """Return counters.

        Returns:
            ``enqueued``, ``dequeued``: the number of elements. ``bytes``, ``peak_bytes``: the size
            of the unread elements in memory, now and at most. ``dropped``: the number of elements
            dropped unread. ``spilled``: the number of elements written to disk. ``waits``,
            ``seconds_waited``: how often and how long programs waited for a reader. ``ready``: the
            number of elements that can be read.
        """
        if self._native is None:
            return dict.fromkeys(_COUNTERS, 0)
        return self._native.statistics()

    def _queue_state(self) -> QueueState | None:
        if self._native is None or self._mode == OutfeedMode.LAST:
            return None
        found = self._native.statistics()
        return QueueState(
            name=self._shown_name or f"OutfeedQueue {os.path.basename(self._source)}",
            ready=int(found["ready"]),
            depth=self._depth(),
            waits=int(found["waits"]),
            seconds_waited=found["seconds_waited"],
            seconds_full=None,
        )

    def _depth(self) -> int | None:
        """Return the number of elements that fit; None if there is no limit."""
        if self._max_bytes is None or self._when_full == "spill":
            return None
        element = sum(dtype.itemsize * math.prod(shape) for dtype, shape in self._components)
        return max(1, self._max_bytes // max(element, 1))

    def _figures(self) -> dict[str, object]:
        return {"mode": self._mode.name, **self.statistics(), "closed": self._closed}

    def __repr__(self) -> str:
        found = self.statistics()
        waited = f", programs waited {found['seconds_waited']:.3g} s" if found["waits"] else ""
        waited += "".join(f", {found[n]} {n}" for n in ("dropped", "spilled") if found[n])
        return (
            f"OutfeedQueue({self._mode.name}, {found['enqueued']} enqueued, "
            f"{found['dequeued']} dequeued, {found['bytes']} bytes held, at most "
            f"{found['peak_bytes']}{waited}{', closed' if self._closed else ''})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> OutfeedQueue:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process gets an empty queue with the same settings.
        make = functools.partial(OutfeedQueue, patience=self._patience, every=self._every)
        return make, (self._mode, self._buffer_depth, self._max_bytes, self._when_full)

    # Internals

    def _check_open(self, call: str) -> None:
        self._process.check()
        if self._closed:
            raise Error(f"OutfeedQueue.{call}: the queue is closed. Make another one.")
