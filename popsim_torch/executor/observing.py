"""The executor's methods for statistics that its program computes: reading and passing them on."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from popsim_torch import logs
from popsim_torch.errors import Error, RecordError, UsageAttributeError, UsageValueError
from popsim_torch.executor.device_program import DeviceProgram
from popsim_torch.executor.inspection import Inspection
from popsim_torch.executor.observed import Condition, Observer
from popsim_torch.executor.record_threads import start_reading
from popsim_torch.executor.recording import ProgramRecorder
from popsim_torch.executor.table import table
from popsim_torch.observe.record import Record, RecordSink
from popsim_torch.observe.sinks import SafeSink
from popsim_torch.records import RunWriter
from popsim_torch.statistics import Counts, Fingerprint, Moments, Request, Sample
from popsim_torch.tensors.selections import Select

__all__ = ["ObservedTensors", "Observing"]

_KEPT = 256 * 2**20
"""The size of the records that wait for ``observations()`` (bytes); the oldest ones are dropped."""
_OF_RUNS: tuple[Request, ...] = (Moments(), Counts(), Fingerprint(), Sample())


@dataclass(frozen=True)
class ObservedTensors:
    """What a compiled model observes; it prints as a table.

    Attributes:
        requests: The statistics of each tensor, by its name, in the order of the program.
        every: The distance of observed device iterations (in inference: of calls); None if the
            budget decides and the first iterations have not been measured yet.
        dropped: The number of records that nobody read in time, and that are lost.
    """

    requests: Mapping[str, tuple[Request, ...]]
    every: int | None
    dropped: int

    def __str__(self) -> str:
        rows = [(name, ", ".join(map(_words, asked))) for name, asked in self.requests.items()]
        every = "not known yet" if self.every is None else str(self.every)
        end = f"Every k-th device iteration is observed; k: {every}."
        if self.dropped:
            end += f" {self.dropped} records were dropped: nobody read them in time."
        return table(("Name", "Statistics"), rows) + "\n" + end


def _weak_call(method: weakref.WeakMethod[Callable[[], None]]) -> Callable[[], None]:
    """Return a function that calls a method if its object is still there."""

    def call() -> None:
        found = method()
        if found is not None:
            found()

    return call


def _words(request: Request) -> str:
    return repr(request).removesuffix("()")


class Observing:
    """The part of an executor that gives what its program observes.

    Args:
        device: The program.
        inspection: The part that knows the names of tensors.
    """

    def __init__(self, device: DeviceProgram, inspection: Inspection) -> None:
        self._device = device
        self._inspection = inspection
        self.lock = threading.RLock()
        self._kept: deque[tuple[list[Record], int]] = deque()
        self._num_kept = 0  # bytes
        self._num_lost = 0
        self._looks = False
        self._sinks: list[SafeSink] = []
        self._completed: list[str] = []  # the names of runs that ended with a program
        self._observer: Observer | None = None
        self._failed: set[Condition] = set()  # those that were met, or raised an exception
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # A weak reference: an executor without references is freed at once.
        device.after_take = _weak_call(weakref.WeakMethod(self.begin))
        device.before_release = _weak_call(weakref.WeakMethod(self.finish))

    def observing(self) -> ObservedTensors:
        """Return which tensors the compiled model observes, and how often.

        Raises:
            Error: The model is not compiled.
        """
        compiled = self._device.require_compiled("observing")
        observer = compiled.observer
        if observer is None:
            return ObservedTensors({}, None, 0)
        requests = {one.name: one.requests for block in observer.blocks for one in block.tensors}
        every = compiled.executable.observed_every
        return ObservedTensors(requests, every or None, observer.dropped + self._num_lost)

    def observations(self) -> list[Record]:
        """Return the records that ``Options.observe`` asked for, as far as they have come.

        Each record is returned once, in the order of the run; any thread may ask, also while the
        model runs. If nobody asks, the newest ones are kept: up to 64 MiB of each block of ops.

        Raises:
            Error: The options observe nothing.
        """
        self._require("observations")
        with self.lock:
            self.look()
            found = [record for records, _ in self._kept for record in records]
            self._kept.clear()
            self._num_kept = 0
            return found

    def add_sink(self, sink: RecordSink) -> None:
        """Pass all further records on to a sink, on a thread of their reader, while the model runs.

        A sink that raises gets no more records; a warning says so, and the model keeps running.
        ``close_sinks`` passes on what is left. So does ``destroy``, and the end of the process.

        Args:
            sink: An object with ``write_records(records)`` and ``close()``, such as
                ``poptorch.HtmlPage``, ``LiveTerminal``, ``SummaryFile``, ``SummaryBoard`` or
                ``RunWriter``.

        Raises:
            UsageTypeError: It is something else.
            Error: The options observe nothing.
        """
        self._add(SafeSink(sink))

    def _add(self, safe: SafeSink) -> None:
        self._require("add_sink")
        with self.lock:
            self.look()
            self._sinks.append(safe)
            self._start()

    def close_sinks(self) -> None:
        """Pass on what the sinks have not got yet, and close them; there are none afterwards."""
        with self.lock:
            self.look()
            sinks, self._sinks = self._sinks, []
        if self._observer is None or not self._observer.conditions:
            self._stop.set()
        for sink in sinks:
            sink.close()

    def record(
        self,
        path: str | os.PathLike[str],
        select: Select = "*",
        *what: Request,
        every: int | None = 1,
        max_bytes: int | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> RunWriter:
        """Record statistics of the run in a folder, for ``poptorch.compare`` and ``popsim diff``.

        Call it before the first call of the model. ``close_sinks``, ``destroy`` or the end of the
        process completes the folder; if the process is killed, it has everything until moments
        before.

        Args:
            path: The folder, usually ``something.popsim``.
            select: The tensors, as in ``Options.observe``.
            *what: The statistics; without it moments, counts, 16 samples and a fingerprint.
            every: As in ``Options.observe``; by default each device iteration is observed.
            max_bytes: The size at which recording stops; None for no limit.
            meta: What to remember of the run, by name: values that JSON has.

        Returns:
            The writer.

        Raises:
            Error: The model is compiled already, or the folder cannot be written.
        """
        if self._device.compiled is not None:
            raise Error(
                "record: the model is compiled already, and what it observes is a part of its "
                "program. Call record before the first call, or model.destroy() first."
            )
        try:
            self._device.options.observe(select, *(what or _OF_RUNS), every=every)
        except UsageAttributeError as error:
            raise UsageValueError(error.message) from None
        writer = RunWriter(path, max_bytes=max_bytes, meta=meta)
        self._add(SafeSink(ProgramRecorder(writer, self._inspection), f"RunWriter({str(path)!r})"))
        return writer

    def begin(self) -> None:
        """Look at records from now on if conditions depend on them."""
        for name in self._completed:
            logs.python.warning(
                "%s was completed when the model left the device, and this program, whose steps "
                "begin at 0 again, is not recorded. Call record with another folder before the "
                "model is compiled again.",
                name,
            )
        self._completed.clear()
        observer = self._device.require_compiled("observe").observer
        if observer is not None and observer.conditions:
            self._failed.clear()
            self._start()

    def finish(self) -> None:
        """Take what is left before the program goes, and complete the recorded runs."""
        with self.lock:
            self.look()
            self._observer = None
            runs = [one for one in self._sinks if isinstance(one.sink, ProgramRecorder)]
            self._sinks = [one for one in self._sinks if one not in runs]
        for one in runs:
            one.close()
        self._completed += [one.name for one in runs]

    def leave_to_parent(self) -> None:
        """Forget sinks and thread, which belong to the parent of this process."""
        self._sinks.clear()
        self._thread = None

    def __del__(self) -> None:
        # Nobody else passes on what is left.
        if self.__dict__.get("_sinks") and not sys.is_finalizing():
            self.close_sinks()

    def _require(self, what: str) -> None:
        if not self._device.options._observations:
            raise Error(
                f"{what}: the options observe nothing. Call options.observe('*') before the model "
                "is wrapped."
            )

    def look(self) -> None:
        """Take what has come, and pass it on."""
        # The garbage collector may let the executor go in the middle of it, and a sink may ask for
        # records.
        if self._looks:
            return
        self._looks = True
        try:
            self._pass_on()
        finally:
            self._looks = False

    def _pass_on(self) -> None:
        compiled = self._device.compiled
        observer = None if compiled is None else compiled.observer
        for one in dict.fromkeys((self._observer, observer)):
            records, num_bytes = ([], 0) if one is None else one.take()
            if not records:
                continue
            assert one is not None
            self._keep(records, num_bytes)
            self._judge(one, records)
            for sink in self._sinks:
                sink.write_records(records)
                if one.dropped:
                    sink.records_dropped(one.dropped)
        self._observer = observer

    def _judge(self, observer: Observer, records: Sequence[Record]) -> None:
        """Look for records that meet a condition."""
        for condition in observer.conditions:
            for record in records:
                if record.name not in condition.names or condition in self._failed:
                    continue
                try:
                    if not condition.when(record):
                        continue
                    if condition.then is not None:
                        condition.then(record)
                        continue
                except Exception as error:
                    self._failed.add(condition)
                    logs.python.warning(
                        "Options.observe: when or then failed and is called no more: %s: %s. The "
                        "model keeps running.",
                        *(type(error).__name__, error),
                    )
                    continue
                self._failed.add(condition)
                self._device.ring(RecordError(_text_of(record), record))

    def _keep(self, records: list[Record], num_bytes: int) -> None:
        """Keep records for ``observations()``, and drop the oldest ones if they are too many."""
        self._kept.append((records, num_bytes))
        self._num_kept += num_bytes
        while self._num_kept > _KEPT and len(self._kept) > 1:
            lost, lost_bytes = self._kept.popleft()
            self._num_kept -= lost_bytes
            self._num_lost += len(lost)

    def _start(self) -> None:
        """Start the reader's thread if there is none; it ends with the executor."""
        if self._thread is not None and self._thread.is_alive() and not self._stop.is_set():
            return
        self._stop = threading.Event()
        self._thread = start_reading(self, self._stop)


def _text_of(record: Record) -> str:
    found = record.statistics
    shown = {
        name: getattr(found, name)
        for name in ("mean", "std", "minimum", "maximum", "norm", "nans", "infs", "zeros")
    }
    numbers = ", ".join(f"{k} {v:.6g}" for k, v in shown.items() if v is not None)
    place = "" if record.micro_batch is None else f", micro-batch {record.micro_batch}"
    return (
        f"Options.observe: '{record.name}' met the condition `when` in device iteration "
        f"{record.step}{place}: {numbers}. The model can be called again."
    )
