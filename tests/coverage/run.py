"""Runs cases in worker processes: a crash or a hang is the outcome of the call that it is in."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from tests.coverage.cases import Case
from tests.coverage.outcome import Outcome

ROOT = Path(__file__).resolve().parents[2]
WORKER = ["-m", "tests.coverage.worker"]
_START_SECONDS = 300


@dataclass(frozen=True)
class Result:
    """The outcome of one call of a case.

    Attributes:
        case: The case.
        number: The number of the call.
        shapes: The shapes of its tensors.
        outcome: How it ended.
    """

    case: Case
    number: int
    shapes: str
    outcome: Outcome


class _Worker:
    """A process that runs cases, and the lines that it has written."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        if self.receive(_START_SECONDS) != ["ready"]:
            raise RuntimeError(f"{ROOT}: a worker does not start")

    def _read(self) -> None:
        with self.process.stdout as stream:
            for line in stream:
                self._lines.put(line)
        self._lines.put("null")

    def send(self, message: Any) -> None:
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def receive(self, seconds: float) -> Any:
        """Return the next message; None if the process has ended.

        Raises:
            queue.Empty: There is none in this time.
        """
        return json.loads(self._lines.get(timeout=seconds))

    def end(self) -> int:
        """End the process, and return its exit code."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.stdin.close()
        return self.process.wait()


@dataclass
class _Lane:
    """Runs one case after the other, in a worker that is replaced when it has ended."""

    most: int | None
    seconds: float
    found: Callable[[Result], None]
    worker: _Worker | None = None

    def run(self, case: Case) -> None:
        ended: list[int] = []
        while not self._finish(case, ended):
            pass

    def _finish(self, case: Case, ended: list[int]) -> bool:
        """Run the calls of a case that have not ended; return whether all have."""
        if self.worker is None:
            self.worker = _Worker()
        self.worker.send([astuple(case), self.most, ended])
        number, shapes = -1, ""
        while True:
            try:
                message = self.worker.receive(self.seconds)
                kind = "crash"
            except queue.Empty:
                message, kind = None, "hang"
            if message is None:
                code, self.worker = self.worker.end(), None
                self.found(Result(case, number, shapes, Outcome(kind, f"exit code {code}")))
                ended.append(number)
                return number < 0  # while it made the samples
            what, *values = message
            if what == "done":
                return True
            number = values[0]
            if what == "begin":
                shapes = values[1]
            else:
                self.found(Result(case, number, shapes, Outcome(**values[1])))
                ended.append(number)


def run_cases(
    cases: Iterable[Case],
    found: Callable[[Result], None],
    *,
    most: int | None = None,
    processes: int = 1,
    seconds: float = 60,
) -> None:
    """Run cases.

    Args:
        cases: The cases.
        found: Called with each result.
        most: The most calls of a case; None for all.
        processes: The number of worker processes.
        seconds: How long a call may take.
    """
    todo: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in cases:
        todo.put(case)
    lock = threading.Lock()

    def add(result: Result) -> None:
        with lock:
            found(result)

    def serve() -> None:
        lane = _Lane(most, seconds, add)
        while True:
            try:
                lane.run(todo.get_nowait())
            except queue.Empty:
                break
        if lane.worker is not None:
            lane.worker.end()

    threads = [threading.Thread(target=serve) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
