"""What queues know of the programs that use them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

from popsim_torch.errors import Error

__all__ = ["ProgramQueue", "Running", "Runs", "was_stopped"]


class ProgramQueue(Protocol):
    """A queue that is told when a program that uses it runs."""

    def _begin_run(self) -> None:
        """A program begins; an Error says that it may not."""

    def _end_run(self, error: BaseException | None) -> None:
        """It has ended, with an error if it failed."""


class Running:
    """A scope in which a program runs, as often as it is entered: its queues are told.

    Args:
        queues: Looked at anew at each beginning.
    """

    def __init__(self, queues: Iterable[ProgramQueue]) -> None:
        self._queues = queues
        self._begun: list[ProgramQueue] = []

    def __enter__(self) -> None:
        """Begin; if a queue refuses, those before it are told that the run has failed."""
        self._begun = []
        try:
            for queue in self._queues:
                queue._begin_run()
                self._begun.append(queue)
        except BaseException as error:
            self._end(error)
            raise

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """End, with the error that leaves the scope."""
        if self._begun:
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        for queue in reversed(self._begun):
            queue._end_run(error)
        self._begun = []


class Runs:
    """Counts the runs that go on, and keeps the error of the last one.

    Runs may be nested, and go on in several threads; together they are one run, which ends when the
    last of them does.

    Attributes:
        changed: Notified at each beginning and end; guards everything here.
        num_active: Runs that go on.
        num_begun: Runs begun so far, nested ones not counted.
        num_followed: Runs whose end a reader has seen.
        failure: What ended the last run, if it was a failure.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.num_active = 0
        self.num_begun = 0
        self.num_followed = 0
        self.failure: BaseException | None = None

    @property
    def has_ended(self) -> bool:
        """Whether there was a run whose end no reader has seen."""
        return self.num_active == 0 and self.num_begun > self.num_followed

    def begin(self) -> None:
        """A run begins."""
        with self.changed:
            if self.num_active == 0:
                self.failure = None
                self.num_begun += 1
            self.num_active += 1
            self.changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        """A run ends, with an error if it failed."""
        with self.changed:
            self.num_active -= 1
            if error is not None and self.failure is None and _is_failure(error):
                self.failure = error
            self.changed.notify_all()

    def mark_followed(self) -> None:
        """A reader has everything of the runs that have ended."""
        with self.changed:
            if self.num_active == 0:
                self.num_followed = self.num_begun


def _is_failure(error: BaseException) -> bool:
    """Return whether an error says more than that somebody ended the run."""
    if not isinstance(error, Exception):
        return False  # Ctrl-C, or the end of the program
    return not (isinstance(error, Error) and was_stopped(error.message))


def was_stopped(message: str) -> bool:
    """Return whether an error's text says that somebody asked the run to end."""
    return message.startswith("run: stopped")
