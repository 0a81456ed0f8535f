"""Tells queues when the programs that use them run."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

from popsim_torch.errors import Error

__all__ = ["ProgramQueue", "Running", "Runs", "was_stopped"]


class ProgramQueue(Protocol):
    """A queue that is notified when a program that uses it begins and ends."""

    def _begin_run(self) -> None:
        """Note that a program begins; raise an Error if it may not."""

    def _end_run(self, error: BaseException | None) -> None:
        """It has ended, with an error if it failed."""


class Running:
    """A scope in which a program runs; it may be entered several times, and notifies the queues.

    Args:
        queues: The queues, read again each time the scope is entered.
    """

    def __init__(self, queues: Iterable[ProgramQueue]) -> None:
        self._queues = queues
        self._begun: list[ProgramQueue] = []

    def __enter__(self) -> None:
        """Notify all queues; if one refuses, tell those before it that the run has failed."""
        self._begun = []
        try:
            for queue in self._queues:
                queue._begin_run()
                self._begun.append(queue)
        except BaseException as error:
            self._end(error)
            raise

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Notify the queues of the end, with the error that leaves the scope, if any."""
        if self._begun:
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        for queue in reversed(self._begun):
            queue._end_run(error)
        self._begun = []


class Runs:
    """Counts the active runs, and keeps the error of the last one.

    Runs may be nested, and may be active in several threads. Runs that overlap count as one run,
    which ends when the last of them ends.

    Attributes:
        changed: Notified at each beginning and end; guards all attributes.
        num_active: The number of active runs.
        num_begun: The number of runs begun so far, without nested ones.
        num_followed: The number of runs whose end a reader has seen.
        failure: The error of the last run, if it failed.
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
        """Note that a run begins."""
        with self.changed:
            if self.num_active == 0:
                self.failure = None
                self.num_begun += 1
            self.num_active += 1
            self.changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        """Note that a run ends, with an error if it failed."""
        with self.changed:
            self.num_active -= 1
            if error is not None and self.failure is None and _is_failure(error):
                self.failure = error
            self.changed.notify_all()

    def mark_followed(self) -> None:
        """Note that a reader has all elements of the runs that have ended."""
        with self.changed:
            if self.num_active == 0:
                self.num_followed = self.num_begun


def _is_failure(error: BaseException) -> bool:
    """Return whether an error is a failure, and not only a request to end the run."""
    if not isinstance(error, Exception):
        return False  # Ctrl-C or the end of the program
    return not (isinstance(error, Error) and was_stopped(error.message))


def was_stopped(message: str) -> bool:
    """Return whether the message of an error says that the run was asked to end."""
    return message.startswith("run: stopped")
