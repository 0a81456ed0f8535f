"""The observed version of a program: what it computes, and the records that come of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from popsim_torch import _native, logs
from popsim_torch.errors import UsageValueError, listed_names
from popsim_torch.executor.conditions import Condition
from popsim_torch.ir import (
    Graph,
    LoopCounts,
    Phase,
    Program,
    Tensor,
    select_tensors,
    tensor_infos,
)
from popsim_torch.observe.record import Record
from popsim_torch.options.observing import Observation
from popsim_torch.passes.observe import ObservedBlock, ObservedTensor, add_observations
from popsim_torch.statistics import (
    Channels,
    Decoder,
    Histogram,
    Request,
    Statistics,
    fitting,
    merge,
    of_pairs,
)

__all__ = ["Observed", "Observer", "observe_program"]

_MAX_BYTES = 64 * 2**20
"""The size of the unread statistics of a block (bytes); after it the oldest ones are dropped."""
_RECORD_BYTES = 1000
"""About the size of a record in Python, without the arrays that it shares with others (bytes)."""
_STEPS_AT_A_TIME = 64


@dataclass(frozen=True)
class Observed:
    """The observed version of a program.

    Attributes:
        program: A copy of the program that computes statistics, too.
        blocks: What each of its queues gets.
        every: The distance of observed device iterations; None if the budget decides.
        budget: The share of the run's time that observing may take.
        num_shared: The number of its first tensors, which are those of the plain version.
        conditions: What the records must not be.
    """

    program: Program
    blocks: tuple[ObservedBlock, ...]
    every: int | None
    budget: float
    num_shared: int
    conditions: tuple[Condition, ...] = ()


def observe_program(
    program: Program, observations: Sequence[Observation], first_queue: int
) -> Observed | None:
    """Return the observed version of a program; None if nothing is to be observed.

    Args:
        program: The program that is the same on every machine; it does not change.
        observations: The requests of the options.
        first_queue: The number of its first queue.
    """
    if not observations:
        return None
    chosen = [_names(program, one) for one in observations]
    for observation, names in zip(observations, chosen, strict=True):
        _check_channels(program, observation, names)
    tensors = _observed_tensors(program, observations, chosen)
    if not tensors:
        return None
    twin = program.copy()
    blocks = add_observations(twin, tensors, first_queue)
    budget = min(one.budget for one in observations)
    conditions = tuple(
        Condition(frozenset(names), one.when, one.then)
        for one, names in zip(observations, chosen, strict=True)
        if one.when is not None
    )
    num_shared = len(program.graph.tensors)
    return Observed(twin, tuple(blocks), observations[0].every, budget, num_shared, conditions)


def _names(program: Program, observation: Observation) -> list[str]:
    """Return the names that a selection means, the same one for all names of a tensor."""
    first: dict[int, str] = {}
    for info in tensor_infos(program):
        if info.name in program.graph.names:
            first.setdefault(program.graph.names[info.name], info.name)
    # Others are computed only if they are anchored.
    known = program.graph.names
    found = select_tensors(program, observation.select, "Options.observe", observation.said)
    names = list(dict.fromkeys(first[known[one.name]] for one in found if one.name in known))
    if found and not names:
        logs.python.warning(
            "Options.observe: %s cannot be observed: such tensors are inside of a loop or branch, "
            "or are computed only if they are anchored. Options.anchorTensor copies them instead.",
            listed_names([one.name for one in found]),
        )
    return names


def _check_channels(program: Program, observation: Observation, names: Sequence[str]) -> None:
    """Warn if channels are asked for of an axis that none of the tensors has."""
    shapes = {name: _tensor(program, name).shape for name in names}
    channels = [one for one in observation.requests if isinstance(one, Channels)]
    for one in channels if names else ():
        if all(one.axis_of(len(shape)) < 0 for shape in shapes.values()):
            name, shape = max(shapes.items(), key=lambda item: len(item[1]))
            logs.python.warning(
                "Options.observe: there will be no statistics of channels. %s asks for an axis "
                "that none of the selected tensors has; '%s' has most axes, its shape is %s. Pass "
                "another axis, or select other tensors.",
                *(one, name, list(shape)),
            )


def _tensor(program: Program, name: str) -> Tensor:
    return program.graph.tensors[program.graph.names[name]]


def _observed_tensors(
    program: Program, observations: Sequence[Observation], chosen: Sequence[Sequence[str]]
) -> list[ObservedTensor]:
    """Return the tensors to observe, in the order of the program."""
    requests: dict[str, list[Request]] = {}
    by_micro_batch: set[str] = set()
    for one, names in zip(observations, chosen, strict=True):
        for name in names:
            requests.setdefault(name, []).extend(one.requests)
            if not one.by_iteration:
                by_micro_batch.add(name)
    return [
        ObservedTensor(
            info.name,
            _united(_tensor(program, info.name), info.name, requests[info.name]),
            info.name not in by_micro_batch,
        )
        for info in tensor_infos(program)
        if info.name in requests
    ]


def _united(tensor: Tensor, name: str, requests: Iterable[Request]) -> tuple[Request, ...]:
    """Return one request of each kind that the tensor can have: that which asks for most."""
    found: dict[type, Request] = {}
    axes: dict[int, Channels] = {}
    for one in fitting(requests, len(tensor.shape)):
        known = found.get(type(one))
        found[type(one)] = one if known is None else max(known, one, key=_amount)
        if isinstance(one, Channels):
            axes[one.axis_of(len(tensor.shape))] = one
    if len(axes) > 1:
        raise UsageValueError(
            f"Options.observe: {' and '.join(map(str, axes.values()))} are asked for of '{name}'. "
            "A tensor has statistics of channels of one axis: select it in one of the calls only."
        )
    if tensor.dtype.is_complex:
        return of_pairs(found.values(), len(tensor.shape))
    return tuple(found.values())


def _amount(request: Request) -> int:
    if isinstance(request, Histogram):
        return request.mantissa_bits
    return int(getattr(request, "k", getattr(request, "n", 0)))


class _Batch:
    """Elements of one queue, which are read when somebody asks for their records.

    Args:
        vectors: The number of the array of each tensor of the block.
        decoders: One for each array.
        arrays: float64, shape ``(elements, replicas, length)``.
    """

    def __init__(
        self,
        vectors: Sequence[int],
        decoders: Sequence[Decoder],
        arrays: Sequence[torch.Tensor],
    ) -> None:
        self._vectors = vectors
        self._decoders = decoders
        self._arrays = arrays
        self._scalars: list[Any] = [None] * len(arrays)

    def statistics(self, tensor: int, element: int, replica: int) -> Statistics:
        """Return the statistics of a tensor; all arguments are numbers."""
        number = self._vectors[tensor]
        decoder, array = self._decoders[number], self._arrays[number]
        scalars = self._scalars[number]
        if scalars is None:
            scalars = self._scalars[number] = array[:, :, : decoder.num_scalars].tolist()
        vector = array[element, replica] if decoder.has_tensors else array
        return decoder.decode(vector, scalars[element][replica])


@dataclass
class _Open:
    """The parts of a device iteration whose records are over all of its micro-batches."""

    step: int = -1
    parts: dict[tuple[str, int], list[Callable[[], Statistics]]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Element:
    """An element of a queue: the statistics of a block of ops at one place of a run.

    Attributes:
        place: The step and the micro-batch of the first replica.
        queue: The number of the queue.
        positions: The step and the micro-batch of each replica.
        batch: The elements that came together.
        index: Its index among them.
    """

    place: list[int]
    queue: int
    positions: list[list[int]]
    batch: _Batch
    index: int


class Observer:
    """Reads the statistics of a compiled program; any thread may use it.

    Args:
        observed: The observed version.
        loop: How often a call runs the program.

    Attributes:
        blocks: What each of its queues gets.
        conditions: What the records must not be.
        queues: The queues.
        program: The number of the program, for its records.
    """

    def __init__(self, observed: Observed, loop: LoopCounts) -> None:
        self.blocks = observed.blocks
        self.conditions = observed.conditions
        self._loop = loop
        self._lock = threading.Lock()
        self.program = 0
        self._open = [_Open() for _ in observed.blocks]
        self._held: list[deque[_Element]] = [deque() for _ in observed.blocks]
        self._last = [-1 for _ in observed.blocks]  # the last step of each queue
        self.queues = [self._queue(block) for block in observed.blocks]
        self._decoders = [_decoders(observed.program.graph, block) for block in observed.blocks]

    def _queue(self, block: ObservedBlock) -> _native.Outfeed:
        axis = (self._loop.replicas,) if self._loop.replicas > 1 else ()
        return _native.Outfeed(
            ["int64"] + ["float64"] * len(block.lengths),
            [(*axis, length) for length in (2, *block.lengths)],
            last=False,
            every=1,
            buffer_depth=4,
            max_bytes=_MAX_BYTES,
            when_full="drop_oldest",
            patience=0.0,
            spill_folder="",
            name=f"statistics of {block.phase.name.lower()}, stage {block.stage}",
        )

    @property
    def dropped(self) -> int:
        """The number of records that were dropped because nobody read them."""
        return sum(
            int(queue.statistics()["dropped"]) * len(block.tensors) * self._loop.replicas
            for queue, block in zip(self.queues, self.blocks, strict=True)
        )

    @property
    def has_unread(self) -> bool:
        """Whether statistics have come that ``take`` has not returned as records."""
        return any(self._held) or any(queue.statistics()["ready"] for queue in self.queues)

    def take(self, executable: _native.Executable) -> tuple[list[Record], int, bool]:
        """Return some of the records that have come and were not taken before.

        They are in the order of steps, micro-batches and ops. Those of a step that has not ended
        are left for later.

        Args:
            executable: The program.

        Returns:
            The records, their bytes, and whether there may be more.
        """
        with self._lock:
            was_running, num_runs = executable.running, executable.num_runs
            num_bytes, is_empty = 0, True
            for number, queue in enumerate(self.queues):
                most = self._most(self.blocks[number])
                count, arrays = queue.take(most)
                if count:
                    num_bytes += self._hold(number, count, arrays)
                is_empty = is_empty and count < most
            is_over = not was_running and not executable.running and executable.num_runs == num_runs
            # Earlier ops may still have to put the statistics of the last step into a queue.
            elements = self._ready(None if is_over and is_empty else min(self._last))
            records = [record for element in elements for record in self._records(element)]
            num_bytes += _RECORD_BYTES * len(records)
            return records, num_bytes, bool(records) or not is_empty

    def _most(self, block: ObservedBlock) -> int:
        """Return how many elements of a queue are taken at a time: those of some steps."""
        if block.phase == Phase.UPDATE:
            return _STEPS_AT_A_TIME
        return _STEPS_AT_A_TIME * self._loop.gradient_accumulation

    def _hold(self, number: int, count: int, arrays: Sequence[torch.Tensor]) -> int:
        """Keep the elements of a queue; return their bytes."""
        shaped = [array.view(count, self._loop.replicas, -1) for array in arrays]
        batch = _Batch(self.blocks[number].vectors, self._decoders[number], shaped[1:])
        held = self._held[number]
        for index, positions in enumerate(shaped[0].tolist()):
            # After Options.watch has ended a device iteration, its micro-batches may run again.
            while held and held[-1].place >= positions[0]:
                held.pop()
            held.append(_Element(positions[0], number, positions, batch, index))
            self._last[number] = positions[0][0]
        return sum(array.nbytes for array in arrays)

    def _ready(self, end: int | None) -> list[_Element]:
        """Return the elements of the steps before ``end``, or all, in order."""
        found: list[_Element] = []
        for held in self._held:
            while held and (end is None or held[0].place[0] < end):
                found.append(held.popleft())
        found.sort(key=lambda one: (*one.place, self.blocks[one.queue].phase, one.queue))
        return found

    def _records(self, element: _Element) -> Iterator[Record]:
        """Yield the records of an element of a queue."""
        block, opened = self.blocks[element.queue], self._open[element.queue]
        is_update, number = block.phase == Phase.UPDATE, self.program
        for replica, (step, micro_batch) in enumerate(element.positions):
            place = None if is_update else micro_batch
            if step != opened.step:
                opened.step = step
                opened.parts.clear()
            for tensor, one in enumerate(block.tensors):
                found = partial(element.batch.statistics, tensor, element.index, replica)
                if place is None or not one.by_iteration:
                    yield Record(one.name, step, place, replica, found, number)
                    continue
                parts = opened.parts.setdefault((one.name, replica), [])
                if micro_batch == 0:  # a device iteration that Options.watch ended begins anew
                    parts.clear()
                parts.append(found)
                if len(parts) == self._loop.gradient_accumulation:
                    merged = partial(_merged, tuple(parts))
                    yield Record(one.name, step, None, replica, merged, number)


def _decoders(graph: Graph, block: ObservedBlock) -> list[Decoder]:
    """Return a decoder for each vector of an element."""
    found: dict[int, Decoder] = {}
    for one, number in zip(block.tensors, block.vectors, strict=True):
        shape = graph.tensors[graph.names[one.name]].shape_of_numbers
        found.setdefault(number, Decoder(one.requests, shape))
    return [found[number] for number in range(len(block.lengths))]


def _merged(parts: Iterable[Callable[[], Statistics]]) -> Statistics:
    return merge([part() for part in parts])
