"""Passes records on to sinks, on a thread of its own: a slow sink stops nothing else."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from popsim_torch.executor.device_program import DeviceProgram
from popsim_torch.executor.record_threads import WorkerThread
from popsim_torch.executor.recording import ProgramRecorder
from popsim_torch.observe.record import Record
from popsim_torch.observe.sinks import SafeSink
from popsim_torch.queue_state import QueueState

__all__ = ["Delivery", "recorder_of"]

_MOST_WAITING = 200_000
"""The number of records that wait for slow sinks; further ones are dropped."""
_SECONDS = 0.05


@dataclass
class _Parcel:
    """Records for some sinks.

    Attributes:
        sinks: Those that have not got them yet.
        records: The records.
        dropped: How many were dropped before them, since the beginning.
    """

    sinks: deque[SafeSink]
    records: list[Record]
    dropped: int


class Delivery:
    """The sinks of an executor or function, and the records on the way to them.

    Attributes:
        lock: Held while sinks are called.
        sinks: The sinks.
        has_lost: The number of records that no sink gets, because sinks were too slow.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.sinks: list[SafeSink] = []
        self.has_lost = 0
        self._mutex = threading.Lock()  # for the next two
        self._waiting: deque[_Parcel] = deque()
        self._num_waiting = 0
        self._at_hand: _Parcel | None = None  # what is being handed over
        self._states: tuple[Sequence[SafeSink], Sequence[QueueState]] = ((), ())
        self._delivers = False
        self._thread: WorkerThread | None = None

    def add(self, sink: SafeSink) -> None:
        """Pass all further records on to a sink."""
        self.sinks.append(sink)
        if self._thread is None or not self._thread.works:
            self._thread = WorkerThread(self, "popsim_torch sinks", _SECONDS)

    def put(self, device: DeviceProgram, records: Sequence[Record], dropped: int) -> None:
        """Pass records of a program on, soon.

        Args:
            device: The program.
            records: The records.
            dropped: How many were dropped so far, because nobody took them.
        """
        sinks = deque(one for one in self.sinks if _takes(one, device))
        if not sinks:
            return
        if self._num_waiting > _MOST_WAITING:
            self.has_lost += len(records)
            return
        dropped += self.has_lost
        with self._mutex:
            self._num_waiting += len(records)
            last = self._waiting[-1] if self._waiting else None
            if last is not None and last.sinks == sinks and last.dropped == dropped:
                last.records += records
            else:
                self._waiting.append(_Parcel(sinks, list(records), dropped))
        if self._thread is not None:
            self._thread.wake()

    @property
    def shows_queues(self) -> bool:
        """Whether a sink wants to know how full queues are."""
        return any(one.shows_queues for one in self.sinks)

    def show_queues(self, states: Sequence[QueueState]) -> None:
        """Tell the sinks soon how full queues are."""
        self._states = [one for one in self.sinks if one.shows_queues], states

    def work(self) -> None:
        """Pass on what waits."""
        self.deliver()

    def deliver(self) -> None:
        """Pass on what waits now, on this thread."""
        with self.lock:
            if self._delivers:  # a sink that asks for it
                return
            self._delivers = True
            try:
                (sinks, states), self._states = self._states, ((), ())
                for sink in sinks if states else ():
                    sink.show_queues(states)
                while (parcel := self._next()) is not None:
                    self._hand_over(parcel)
                    self._at_hand = None
            finally:
                self._delivers = False

    def _next(self) -> _Parcel | None:
        """Return what was not handed over completely, or else what waits longest."""
        with self._mutex:
            if self._at_hand is None and self._waiting:
                self._at_hand = self._waiting.popleft()
                self._num_waiting -= len(self._at_hand.records)
            return self._at_hand

    def _hand_over(self, parcel: _Parcel) -> None:
        while parcel.sinks:
            sink = parcel.sinks[0]
            sink.write_records(parcel.records)
            if parcel.dropped:
                sink.records_dropped(parcel.dropped)
            parcel.sinks.popleft()

    def close(self, sinks: Collection[SafeSink]) -> None:
        """Pass on what waits, and close some sinks, which get no more records."""
        self.sinks = [one for one in self.sinks if one not in sinks]
        self.deliver()
        if not self.sinks and self._thread is not None:
            self._thread.stop()
        with self.lock:
            for sink in sinks:
                sink.close()


def recorder_of(sink: SafeSink) -> ProgramRecorder | None:
    """Return the recorder that a sink is; None for other sinks."""
    return sink.sink if isinstance(sink.sink, ProgramRecorder) else None


def _takes(sink: SafeSink, device: DeviceProgram) -> bool:
    """Return whether a sink takes the records of a program."""
    recorder = recorder_of(sink)
    return recorder is None or recorder.device is device
