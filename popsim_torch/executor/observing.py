"""The methods for statistics that programs compute: reading them, and passing them on."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec

from popsim_torch import logs
from popsim_torch.errors import Error, UsageAttributeError, UsageValueError
from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.executor.conditions import Condition, Judge
from popsim_torch.executor.delivery import Delivery, recorder_of
from popsim_torch.executor.device_program import DeviceProgram
from popsim_torch.executor.kept_records import KeptRecords
from popsim_torch.executor.observed import Observer
from popsim_torch.executor.queues import queue_states
from popsim_torch.executor.record_threads import WorkerThread, keep_track
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
_PARTS = 16
"""How many parts of the records are taken at a time while a program runs."""
_SECONDS = 0.05
_SECONDS_OF_CONDITIONS = 0.005
"""The time between two looks at records, if conditions may end the run."""
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
        observer: Reads the statistics that it computes.
        judge: Looks at its records.
    """

    device: DeviceProgram
    compiled: CompiledModel
    observer: Observer
    judge: Judge


class Observing:
    """Gives what one or several programs observe.

    Args:
        options: The options of all the programs.

    Attributes:
        options: As given.
        already_met: The conditions that programs which come from now on do not look at.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.already_met: Collection[Condition] = ()
        self._lock = threading.RLock()  # held while records are taken and judged
        self._devices: list[DeviceProgram] = []
        self._programs: list[_Program] = []
        self._num_programs = 0
        self._kept = KeptRecords()
        self._delivery = Delivery()
        self._looks = False
        self._leaving: list[DeviceProgram] = []
        self._completed: list[str] = []  # the names of runs that ended with a program
        self._thread: WorkerThread | None = None
        self._judged = threading.Condition()
        self._asked = self._answered = 0  # how often all records were to be judged, and were

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
        if not self._devices:
            raise Error(
                "observing: the model has not been compiled or has been destroyed. Call it first."
            )
        requests, every, dropped = {}, None, self._kept.lost + self._delivery.has_lost
        for program in self._programs:
            blocks = program.observer.blocks
            requests.update({one.name: one.requests for b in blocks for one in b.tensors})
            every = program.compiled.executable.observed_every
            dropped += program.observer.dropped
        return ObservedTensors(requests, every or None, dropped)

    def observations(self) -> list[Record]:
        """Return the records that ``Options.observe`` asked for, as far as they have come.

        Each record is returned once, in the order of the run; any thread may ask, also while the
        model runs. If nobody asks, the newest ones are kept: up to 256 MiB, or 64 MiB if there are
        sinks.

        Raises:
            Error: The options observe nothing.
        """
        self._require("observations")
        with self._lock:
            self._look()
            return self._kept.take()

    def unread(self) -> list[Record]:
        """Return the records that ``observations`` would return, and leave them there."""
        with self._lock:
            self._look()
            return self._kept.records

    def add_sink(self, sink: RecordSink) -> None:
        """Pass all further records on to a sink, on a thread of their own, while the model runs.

        A sink that raises gets no more records; a warning says so, and the model keeps running.
        ``close_sinks`` passes on what is left. So does ``destroy``, and the end of the process.

        Args:
            sink: An object with ``write_records(records)`` and ``close()``, such as
                ``poptorch.HtmlPage``, ``LiveTerminal``, ``SummaryFile``, ``SummaryBoard`` or
                ``RunWriter``. A ``RunWriter`` records one program, as ``record`` does.

        Raises:
            UsageTypeError: It is something else.
            Error: The options observe nothing.
        """
        safe = SafeSink(sink)
        if isinstance(sink, RunWriter):
            safe = SafeSink(ProgramRecorder(sink), safe.name)
        self._add(safe, "add_sink")

    def _add(self, safe: SafeSink, what: str) -> None:
        self._require(what)
        with self._lock:
            self._look()
            self._delivery.add(safe)
            recorder = recorder_of(safe)
            if recorder is not None and self._programs:
                recorder.device = self._programs[0].device
            self._start()

    def close_sinks(self) -> None:
        """Pass on what the sinks have not got yet, and close them; there are none afterwards."""
        self._close(list(self._delivery.sinks))

    def _close(self, sinks: Sequence[SafeSink]) -> None:
        """Pass on what some sinks have not got yet, and close them."""
        with self._lock:
            self._look()
        self._delivery.close(sinks)
        if not self._delivery.sinks and not self._has_conditions and self._thread is not None:
            self._thread.stop()

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
        if self._devices:
            raise Error(
                "record: the model is compiled already, and what it observes is a part of its "
                "program. Call record before the first call, or model.destroy() first."
            )
        requests = what or _OF_RUNS
        try:
            self.options.clone().observe(select, *requests, every=every)
            writer = RunWriter(path, max_bytes=max_bytes, meta=meta)
            self.options.observe(select, *requests, every=every)
        except UsageAttributeError as error:
            raise UsageValueError(error.message) from None
        self._add(SafeSink(ProgramRecorder(writer), f"RunWriter({str(path)!r})"), "record")
        return writer

    def met(self) -> set[Condition]:
        """Return the conditions that the records of the present programs have met."""
        return {condition for program in self._programs for condition in program.judge.met}

    def _begin(self, device: DeviceProgram) -> None:
        """Read the records of a program from now on."""
        compiled = device.require_compiled("observe")
        observer = compiled.observer
        device.judge = None
        with self._lock:
            self._devices.append(device)
            if observer is None:
                return
            judge = Judge(observer.conditions, device.ring, self.already_met)
            observer.program, self._num_programs = self._num_programs, self._num_programs + 1
            self._programs.append(_Program(device, compiled, observer, judge))
            self._assign_runs(device)
            if observer.conditions:
                device.judge = _weak_call(weakref.WeakMethod(self._judge_run))
            if observer.conditions or self._delivery.sinks:
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
        for safe in self._delivery.sinks:
            recorder = recorder_of(safe)
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
        return any(one.observer.conditions for one in self._programs)

    def _finish(self, device: DeviceProgram) -> None:
        """Take what is left before a program goes, and complete its recorded runs."""
        with self._lock:
            if self._looks:  # the garbage collector lets the executor go in the middle of a look
                self._leaving.append(device)
                return
            self._look()
            self._devices = [one for one in self._devices if one is not device]
            self._programs = [one for one in self._programs if one.device is not device]
        runs = [
            sink
            for sink in self._delivery.sinks
            if (recorder := recorder_of(sink)) is not None and recorder.device is device
        ]
        self._delivery.close(runs)
        self._completed += [one.name for one in runs]

    def _judge_run(self) -> None:
        """Wait until all records of a run were looked at."""
        unread = any(one.observer.has_unread or one.judge.is_behind for one in self._programs)
        # In this order: a look that has emptied the queues may not have judged yet.
        if not unread and not self._looks:
            return
        with self._judged:
            self._asked += 1
            asked = self._asked
            while self._thread is not None and self._thread.works and self._answered < asked:
                self._thread.wake()
                self._judged.wait(_SECONDS)
        if self._answered < asked:
            with self._lock:
                self._look()
            if self._thread is None:  # a process that was forked, and runs the model itself
                self._start()

    def work(self) -> None:
        """Take what has come; called on the thread."""
        asked = self._asked
        with self._lock:
            more = self._look()
        if more:
            self._wake()
            return
        with self._judged:
            self._answered = max(self._answered, asked)
            self._judged.notify_all()

    def _wake(self) -> None:
        if self._thread is not None:
            self._thread.wake()

    @property
    def locks(self) -> Sequence[threading.RLock]:
        """Held while it is in the middle of something."""
        return self._lock, self._delivery.lock

    def leave_to_parent(self) -> None:
        """Forget sinks and threads, which belong to the parent of this process."""
        self._delivery = Delivery()
        self._lock = threading.RLock()
        self._judged = threading.Condition()
        self._thread = None

    def __del__(self) -> None:
        # Nobody else passes on what is left.
        if "_thread" in self.__dict__ and self._delivery.sinks and not sys.is_finalizing():
            self.close_sinks()

    def _require(self, what: str) -> None:
        if not self.options._observations:
            raise Error(
                f"{what}: the options observe nothing. Call options.observe('*') before the model "
                "is wrapped."
            )

    def _look(self) -> bool:
        """Take what has come, judge it, and pass it on; the lock is held.

        Returns:
            Whether programs run that may have more already.
        """
        # A condition may ask for records, and the garbage collector may let the executor go in the
        # middle of it.
        if self._looks:
            return False
        self._looks = True
        try:
            more = [self._take_parts(program) for program in list(self._programs)]
            if self._delivery.shows_queues and self._programs:
                queues = [one.compiled.queues for one in self._programs]
                self._delivery.show_queues(queue_states(queues))
        finally:
            self._looks = False
        while self._leaving:
            self._finish(self._leaving.pop())
        return any(more)

    def _take_parts(self, program: _Program) -> bool:
        """Take all records of a program, or many while it runs; return whether it may have more."""
        num_taken = 0
        while self._take(program):
            num_taken += 1
            if num_taken >= _PARTS and program.compiled.executable.running:
                return True
        return False

    def _take(self, program: _Program) -> bool:
        """Take some of the records of a program; return whether there may be more."""
        observer = program.observer
        records, num_bytes, more = observer.take(program.compiled.executable)
        if records:
            self._kept.add(records, num_bytes, few=bool(self._delivery.sinks))
            self._delivery.put(program.device, records, observer.dropped)
        program.judge.judge(records)
        return more

    def _start(self) -> None:
        """Start the reader's thread if there is none; it ends with the executor."""
        keep_track(self)
        if self._thread is None or not self._thread.works:
            may_end = any(one.when is not None for one in self.options._observations)
            seconds = _SECONDS_OF_CONDITIONS if may_end else _SECONDS
            self._thread = WorkerThread(self, "popsim_torch records", seconds)
