"""The methods for statistics that programs compute: reading them, and passing them on."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec

from popsim_torch import logs
from popsim_torch.errors import Error, RecordError, UsageAttributeError, UsageValueError
from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.executor.device_program import DeviceProgram
from popsim_torch.executor.observed import Condition, Observer
from popsim_torch.executor.queues import queue_states
from popsim_torch.executor.record_threads import start_reading
from popsim_torch.executor.recording import ProgramRecorder
from popsim_torch.executor.table import table
from popsim_torch.observe.record import Record, RecordSink
from popsim_torch.observe.sinks import SafeSink
from popsim_torch.options import Options
from popsim_torch.records import RunWriter
from popsim_torch.statistics import Counts, Fingerprint, Moments, Request, Sample
from popsim_torch.tensors.selections import Select

__all__ = ["ObservedTensors", "Observing"]

P = ParamSpec("P")
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


def _weak_call(method: weakref.WeakMethod[Callable[P, None]]) -> Callable[P, None]:
    """Return a function that calls a method if its object is still there."""

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        found = method()
        if found is not None:
            found(*args, **kwargs)

    return call


def _words(request: Request) -> str:
    return repr(request).removesuffix("()")


@dataclass(eq=False)
class _Program:
    """A program on the device.

    Attributes:
        device: Runs it.
        compiled: The program.
        failed: The conditions that were met, or raised an exception.
    """

    device: DeviceProgram
    compiled: CompiledModel
    failed: set[Condition] = field(default_factory=set)

    @property
    def observer(self) -> Observer | None:
        """Reads the statistics that the program computes; None if it computes none."""
        return self.compiled.observer


class Observing:
    """Gives what one or several programs observe.

    Args:
        options: The options of all the programs.

    Attributes:
        options: As given.
        lock: Held while records are read.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.lock = threading.RLock()
        self._programs: list[_Program] = []
        self._kept: deque[tuple[list[Record], int]] = deque()
        self._num_kept = 0  # bytes
        self._num_lost = 0
        self._looks = False
        self._sinks: list[SafeSink] = []
        self._completed: list[str] = []  # the names of runs that ended with a program
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def join(self, device: DeviceProgram) -> None:
        """Observe all programs that a device program takes from now on."""
        # Weak references: an executor without references is freed at once.
        device.after_take = _weak_call(weakref.WeakMethod(self._begin))
        device.before_release = _weak_call(weakref.WeakMethod(self._finish))

    def observing(self) -> ObservedTensors:
        """Return which tensors the compiled model observes, and how often.

        Raises:
            Error: Nothing is compiled.
        """
        if not self._programs:
            raise Error(
                "observing: the model has not been compiled or has been destroyed. Call it first."
            )
        requests, every, dropped = {}, None, self._num_lost
        for program in self._programs:
            if program.observer is not None:
                blocks = program.observer.blocks
                requests.update({one.name: one.requests for b in blocks for one in b.tensors})
                every = program.compiled.executable.observed_every
                dropped += program.observer.dropped
        return ObservedTensors(requests, every or None, dropped)

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
        self._add(SafeSink(sink), "add_sink")

    def _add(self, safe: SafeSink, what: str) -> None:
        self._require(what)
        with self.lock:
            self.look()
            self._sinks.append(safe)
            self._start()

    def close_sinks(self) -> None:
        """Pass on what the sinks have not got yet, and close them; there are none afterwards."""
        self._close(list(self._sinks))

    def _close(self, sinks: Sequence[SafeSink]) -> None:
        """Pass on what some sinks have not got yet, and close them."""
        with self.lock:
            self.look()
            self._sinks = [one for one in self._sinks if one not in sinks]
            if not self._sinks and not self._has_conditions:
                self._stop.set()
        for sink in sinks:
            sink.close()

    @contextmanager
    def passing_on(self, what: str, sinks: Sequence[RecordSink]) -> Iterator[None]:
        """Pass records on to some sinks in this scope, and close them at its end.

        Args:
            what: The function whose argument they are, for messages.
            sinks: As for ``add_sink``.

        Raises:
            Error: The options observe nothing.
        """
        safe = [SafeSink(one) for one in sinks]
        try:
            for one in safe:
                self._add(one, what)
            yield
        finally:
            self._close(safe)

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
        if self._programs:
            raise Error(
                "record: the model is compiled already, and what it observes is a part of its "
                "program. Call record before the first call, or model.destroy() first."
            )
        try:
            self.options.observe(select, *(what or _OF_RUNS), every=every)
        except UsageAttributeError as error:
            raise UsageValueError(error.message) from None
        writer = RunWriter(path, max_bytes=max_bytes, meta=meta)
        self._add(SafeSink(ProgramRecorder(writer), f"RunWriter({str(path)!r})"), "record")
        return writer

    def _begin(self, device: DeviceProgram) -> None:
        """Read the records of a program from now on."""
        program = _Program(device, device.require_compiled("observe"))
        device.judge = None
        with self.lock:
            self._programs.append(program)
            if program.observer is None:
                return
            self._assign_runs(device)
            if program.observer.conditions:
                device.judge = _weak_call(weakref.WeakMethod(self._judge_run))
                self._start()

    def _assign_runs(self, device: DeviceProgram) -> None:
        """Record a program in the folders that do not belong to another one."""
        completed, self._completed = self._completed, []
        for name in completed:
            logs.python.warning(
                "%s was completed when the model left the device, and this program, whose steps "
                "begin at 0 again, is not recorded. Call record with another folder before the "
                "model is compiled again.",
                name,
            )
        for safe in self._sinks:
            recorder = _recorder(safe)
            if recorder is None:
                continue
            if recorder.device is None:
                recorder.device = device
            else:
                logs.python.warning(
                    "%s records the program that was compiled first. This one, whose steps begin "
                    "at 0 as well, is not recorded.",
                    safe.name,
                )

    @property
    def _has_conditions(self) -> bool:
        observers = [one.observer for one in self._programs]
        return any(one is not None and one.conditions for one in observers)

    def _finish(self, device: DeviceProgram) -> None:
        """Take what is left before a program goes, and complete its recorded runs."""
        with self.lock:
            self.look()
            self._programs = [one for one in self._programs if one.device is not device]
            runs = [one for one in self._sinks if _is_run_of(one, device)]
            self._sinks = [one for one in self._sinks if one not in runs]
        for one in runs:
            one.close()
        self._completed += [one.name for one in runs]

    def _judge_run(self) -> None:
        """Look at the last records of a run."""
        with self.lock:
            self.look()

    def leave_to_parent(self) -> None:
        """Forget sinks and thread, which belong to the parent of this process."""
        self._sinks.clear()
        self._thread = None

    def __del__(self) -> None:
        # Nobody else passes on what is left.
        if self.__dict__.get("_sinks") and not sys.is_finalizing():
            self.close_sinks()

    def _require(self, what: str) -> None:
        if not self.options._observations:
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
            self._show_queues()
            self._pass_on()
        finally:
            self._looks = False

    def _pass_on(self) -> None:
        for program in list(self._programs):
            observer = program.observer
            records, num_bytes = ([], 0) if observer is None else observer.take()
            if not records:
                continue
            assert observer is not None
            self._keep(records, num_bytes)
            _judge(program, observer, records)
            for sink in self._sinks:
                if _recorder(sink) is None or _is_run_of(sink, program.device):
                    sink.write_records(records)
                    if observer.dropped:
                        sink.records_dropped(observer.dropped)

    def _show_queues(self) -> None:
        """Tell the sinks that want to know it how full the queues of the programs are."""
        sinks = [one for one in self._sinks if one.shows_queues]
        programs = self._programs if sinks else []
        states = queue_states([one.compiled.queues for one in programs]) if programs else []
        for sink in sinks:
            if states:
                sink.show_queues(states)

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


def _recorder(safe: SafeSink) -> ProgramRecorder | None:
    """Return the recorder that a sink is; None for other sinks."""
    return safe.sink if isinstance(safe.sink, ProgramRecorder) else None


def _is_run_of(safe: SafeSink, device: DeviceProgram) -> bool:
    """Return whether a sink is the recorded run of a program."""
    recorder = _recorder(safe)
    return recorder is not None and recorder.device is device


def _judge(program: _Program, observer: Observer, records: Sequence[Record]) -> None:
    """Look for records that meet a condition."""
    for condition in observer.conditions:
        for record in records:
            if record.name not in condition.names or condition in program.failed:
                continue
            try:
                if not condition.when(record):
                    continue
                if condition.then is not None:
                    condition.then(record)
                    continue
            except Exception as error:
                program.failed.add(condition)
                logs.python.warning(
                    "Options.observe: when or then failed and is called no more: %s: %s. The "
                    "model keeps running.",
                    *(type(error).__name__, error),
                )
                continue
            program.failed.add(condition)
            program.device.ring(RecordError(_text_of(record), record))


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
