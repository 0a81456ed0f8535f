"""The queues that a program feeds, and the queues that feed it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from popsim_torch import _native
from popsim_torch.errors import Error
from popsim_torch.feeds import InfeedQueue
from popsim_torch.feeds.runs import ProgramQueue, Running
from popsim_torch.ir import LoopCounts
from popsim_torch.queue_state import HasQueueState, QueueState, loaders
from popsim_torch.trace.graph.enqueues import Enqueue


@dataclass(frozen=True)
class _Iterations:
    """Tells an infeed queue how many elements a run takes."""

    infeed: InfeedQueue
    iterations: int | None

    def _begin_run(self) -> None:
        self.infeed._begin_run(self.iterations)

    def _end_run(self, error: BaseException | None) -> None:
        self.infeed._end_run(error)


class Queues:
    """Connects a program with its queues, and notifies them about runs.

    Args:
        enqueues: The tensors that the program puts into queues, by number.
        infeeds: The queues that the program takes elements from.
        places: The source of each input; empty if all inputs come from the call.
        iterations: Number of elements that a run takes from each infeed; None if it is unknown.
    """

    def __init__(
        self,
        enqueues: Mapping[int, Enqueue],
        infeeds: Sequence[InfeedQueue] = (),
        places: Sequence[_native.InputPlace] = (),
        iterations: int | None = None,
    ) -> None:
        self._enqueues = enqueues
        self._infeeds = infeeds
        self._places = places
        self._is_running = False
        self._told = Running(
            [*self.outfeeds, *(_Iterations(infeed, iterations) for infeed in infeeds)]
        )

    @property
    def feeds_program(self) -> bool:
        """Whether the program takes elements from queues."""
        return bool(self._infeeds)

    @property
    def outfeeds(self) -> list[ProgramQueue]:
        """The queues that the program feeds."""
        return [enqueue.queue for enqueue in self._enqueues.values()]

    @property
    def shared(self) -> tuple[int, ...]:
        """The positions of the inputs with one value that all micro-batches read."""
        return tuple(i for i, place in enumerate(self._places) if place.shared)

    @property
    def all(self) -> list[HasQueueState]:
        """The queues that feed the program, and those that it feeds."""
        return [*self._infeeds, *(enqueue.queue for enqueue in self._enqueues.values())]

    def connect(
        self,
        executable: _native.Executable,
        num_inputs: int,
        loop: LoopCounts,
        more: Sequence[_native.Outlet] = (),
    ) -> None:
        """Connect a program that has been compiled.

        Args:
            executable: The program.
            num_inputs: The number of its inputs.
            loop: Says how many replicas it has; an element that it enqueues has the tensors of all
                of them, along a first axis if there are several.
            more: The queues that its observed version feeds besides.

        Raises:
            Error: A queue already has elements of another structure or shape, or is for another
                number of replicas.
        """
        axis = (loop.replicas,) if loop.replicas > 1 else ()
        outlets = [
            enqueue.queue._attach(
                enqueue.structure,
                [(dtype, (*axis, *shape)) for dtype, shape in enqueue.components],
                enqueue.source,
                replicas=loop.replicas,
            )
            for enqueue in self._enqueues.values()
        ]
        plan = executable.plan
        for infeed in self._infeeds:
            # Elements are made in advance also while those of an iteration are kept.
            ahead = infeed.prefetch_depth if plan.keeps_elements else 0
            infeed._native.ensure_depth(plan.max_held * loop.num_inputs + ahead)
        inlets = [infeed._native for infeed in self._infeeds]
        places = list(self._places) or [_native.InputPlace()] * num_inputs
        with _native.translated_errors():
            executable.connect([*outlets, *more], inlets, places)

    def running(self) -> Queues:
        """Return a scope that tells the queues that the program runs.

        Raises:
            Error: The program runs already; raised at the beginning of the scope. The other run
                continues, and the readers of its elements get no error.
        """
        return self

    def __enter__(self) -> None:
        """Begin a run."""
        if self._is_running:
            raise Error(
                "run: this executable is already running; call it from one thread at a time"
            )
        self._is_running = True
        try:
            self._told.__enter__()
        except BaseException:
            self._is_running = False
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End a run."""
        try:
            self._told.__exit__(kind, error, trace)
        finally:
            self._is_running = False


def queue_states(programs: Iterable[Queues | None]) -> list[QueueState]:
    """Return how full the queues of some programs are, and the loaders of this process.

    Args:
        programs: The queues of each program; None for a program without queues.
    """
    queues = [queue for one in programs if one is not None for queue in one.all]
    states = [queue._queue_state() for queue in dict.fromkeys([*loaders(), *queues])]
    numbers: Counter[str] = Counter()
    shown = []
    for state in states:
        if state is None:
            continue
        numbers[state.name] += 1
        number = numbers[state.name]
        shown.append(replace(state, name=f"{state.name} {number}") if number > 1 else state)
    return shown
