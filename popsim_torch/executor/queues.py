"""The queues that a program feeds and is fed from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from popsim_torch import _native
from popsim_torch.errors import Error
from popsim_torch.trace.graph.enqueues import Enqueue


class Queues:
    """Connects a program with its queues, and tells them when it runs.

    Args:
        enqueues: What the program puts into queues, by number.
        infeeds: The queues that it takes elements from.
        places: Where each input comes from; none: from the call.
    """

    def __init__(
        self,
        enqueues: Mapping[int, Enqueue],
        infeeds: Sequence[object] = (),
        places: Sequence[_native.InputPlace] = (),
    ) -> None:
        self._enqueues = enqueues
        self._infeeds = infeeds
        self._places = places
        self._is_running = False

    @property
    def outfeeds(self) -> list[object]:
        """The queues that the program feeds."""
        return [enqueue.queue for enqueue in self._enqueues.values()]

    def connect(self, executable: _native.Executable, num_inputs: int) -> None:
        """Connect a program that has been compiled.

        Raises:
            Error: A queue has elements of another structure or shape already.
        """
        outlets = [
            enqueue.queue._attach(enqueue.structure, list(enqueue.components), enqueue.source)
            for enqueue in self._enqueues.values()
        ]
        for infeed in self._infeeds:
            infeed._native.ensure_depth(executable.plan.max_in_flight)  # type: ignore[attr-defined]
        inlets = [infeed._native for infeed in self._infeeds]  # type: ignore[attr-defined]
        places = list(self._places) or [_native.InputPlace()] * num_inputs
        with _native.translated_errors():
            executable.connect(outlets, inlets, places)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the queues know that the program runs.

        Raises:
            Error: It does already. That is no failure of the run that goes on, and no reader of its
                elements hears of it.
        """
        if self._is_running:
            raise Error(
                "run: this executable is already running; call it from one thread at a time"
            )
        begun = []
        failure: BaseException | None = None
        try:
            self._is_running = True
            for queue in (*self.outfeeds, *self._infeeds):
                queue._begin_run()  # type: ignore[attr-defined]
                begun.append(queue)
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            for queue in reversed(begun):
                queue._end_run(failure)  # type: ignore[attr-defined]
            self._is_running = False
