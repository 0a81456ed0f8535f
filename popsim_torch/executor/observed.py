"""The observed version of a program: what it computes, and the records that come of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from popsim_torch import _native, logs
from popsim_torch.errors import UsageValueError, listed_names
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
)

__all__ = ["Observed", "Observer", "observe_program"]

_MAX_BYTES = 64 * 2**20
"""The size of the unread statistics of a block (bytes); after it the oldest ones are dropped."""


@dataclass(frozen=True)
class Condition:
    """A condition on the records of some tensors.

    Attributes:
        names: The names of the tensors.
        when: Returns whether a record meets the condition.
        then: Called with such a record; None to end the run.
    """

    names: frozenset[str]
    when: Callable[[Record], object]
    then: Callable[[Record], object] | None


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
    found = select_tensors(program, observation.select, "Options.observe")
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


class Observer:
    """Reads the statistics of a compiled program; any thread may use it.

    Args:
        observed: The observed version.
        loop: How often a call runs the program.
    """

    def __init__(self, observed: Observed, loop: LoopCounts) -> None:
        self.blocks = observed.blocks
        self.conditions = observed.conditions
        self._loop = loop
        self._lock = threading.Lock()
        self._open = [_Open() for _ in observed.blocks]
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

    def take(self) -> tuple[list[Record], int]:
        """Return the records that have come and were not taken before, and their size in bytes.

        They are in the order of steps, micro-batches and ops, as far as they have come.
        """
        with self._lock:
            elements: list[tuple[list[int], int, int, _Batch, list[list[int]]]] = []
            num_bytes = 0
            for number, queue in enumerate(self.queues):
                count, arrays = queue.take(-1)
                if not count:
                    continue
                num_bytes += sum(array.nbytes for array in arrays)
                shaped = [array.view(count, self._loop.replicas, -1) for array in arrays]
                vectors = self.blocks[number].vectors
                batch = _Batch(vectors, self._decoders[number], shaped[1:])
                phase = int(self.blocks[number].phase)
                places = shaped[0].tolist()
                elements += [
                    ([*places[index][0], phase], number, index, batch, places[index])
                    for index in _not_repeated([positions[0] for positions in places])
                ]
            elements.sort(key=lambda element: element[:3])
            records = [
                record
                for _, number, index, batch, positions in elements
                for record in self._records(number, index, batch, positions)
            ]
            return records, num_bytes

    def _records(
        self, number: int, index: int, batch: _Batch, positions: list[list[int]]
    ) -> Iterator[Record]:
        """Yield the records of an element of a queue."""
        block, opened = self.blocks[number], self._open[number]
        is_update = block.phase == Phase.UPDATE
        for replica, (step, micro_batch) in enumerate(positions):
            place = None if is_update else micro_batch
            if step != opened.step:
                opened.step = step
                opened.parts.clear()
            for tensor, one in enumerate(block.tensors):
                found = partial(batch.statistics, tensor, index, replica)
                if place is None or not one.by_iteration:
                    yield Record(one.name, step, place, replica, found)
                    continue
                parts = opened.parts.setdefault((one.name, replica), [])
                if micro_batch == 0:  # a device iteration that Options.watch ended begins anew
                    parts.clear()
                parts.append(found)
                if len(parts) == self._loop.gradient_accumulation:
                    yield Record(one.name, step, None, replica, partial(_merged, tuple(parts)))


def _not_repeated(places: Sequence[list[int]]) -> list[int]:
    """Return the indices of all elements but those whose micro-batches ran again later.

    Args:
        places: The step and micro-batch of each element. They grow, but begin anew after
            ``Options.watch`` has ended a device iteration.
    """
    kept: list[int] = []
    for index, place in enumerate(places):
        while kept and places[kept[-1]] >= place:
            kept.pop()
        kept.append(index)
    return kept


def _decoders(graph: Graph, block: ObservedBlock) -> list[Decoder]:
    """Return a decoder for each vector of an element."""
    found: dict[int, Decoder] = {}
    for one, number in zip(block.tensors, block.vectors, strict=True):
        shape = graph.tensors[graph.names[one.name]].shape
        found.setdefault(number, Decoder(one.requests, shape))
    return [found[number] for number in range(len(block.lengths))]


def _merged(parts: Iterable[Callable[[], Statistics]]) -> Statistics:
    return merge([part() for part in parts])
