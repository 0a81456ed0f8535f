"""``executor.levers``: what device iterations, replicas and queues change on this computer."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from popsim_torch import _native
from popsim_torch.errors import Error, UsageTypeError, UsageValueError
from popsim_torch.executor.compile_request import ModelRequest
from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.executor.device_program import DeviceProgram
from popsim_torch.executor.interface import loop_counts
from popsim_torch.executor.life_cycle import LifeCycle
from popsim_torch.executor.queues import Queues
from popsim_torch.feeds import InfeedQueue
from popsim_torch.ir import LoopCounts
from popsim_torch.options import Options
from popsim_torch.private_torch.trees import tree_leaves, tree_map_only
from popsim_torch.tables import Described, terminal_width
from popsim_torch.trace.graph.enqueues import Enqueue

__all__ = ["Lever", "LeverPoint", "Levers", "measure_levers"]

_ENOUGH = 0.95
"""The share of the best rate that the knee of a curve has."""
_LEAST_CALLS = 3
_LONG = 4
"""A call that takes this many times the time of a measurement ends a curve."""
_ITERATIONS, _REPLICAS, _FEED = "deviceIterations", "replicationFactor", "inputs from"
_ARGUMENTS, _QUEUE = "arguments", "a queue"


class Twin(Protocol):
    """A copy of an executor: it has a model, an optimizer and options of its own."""

    _device: DeviceProgram
    _life: LifeCycle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on a combined batch."""

    def destroy(self) -> None:
        """Release the program and the device."""


MakeTwin = Callable[[Callable[[Options], object]], Twin]
"""Makes a copy of an executor; the function that it gets may change the options of the copy."""


@dataclass(frozen=True)
class LeverPoint:
    """A position of a lever, with measured figures.

    Attributes:
        value: The position.
        seconds: The measured time of a call on this computer: the median (s).
        rate: Items of the batch per second, over all replicas.
        share: The rate as a share of the best one of this lever.
    """

    value: int | str
    seconds: float
    rate: float
    share: float


@dataclass(frozen=True)
class Lever:
    """The measured curve of one lever.

    Attributes:
        name: The lever: ``deviceIterations``, ``replicationFactor`` or ``inputs from``.
        points: The positions that were measured, in order.
        left_out: Why other positions were not measured, by position.
    """

    name: str
    points: tuple[LeverPoint, ...]
    left_out: Mapping[int | str, str] = field(default_factory=dict)

    @property
    def knee(self) -> LeverPoint | None:
        """The first position with 95 % of the best rate; None if nothing was measured."""
        return next((point for point in self.points if point.share >= _ENOUGH), None)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.name:>18} {'ms per call':>12} {'items/s':>12} {'of the best':>12}"
        for point in self.points:
            yield (
                f"{point.value!s:>18} {1e3 * point.seconds:>12.3f} {point.rate:>12,.0f} "
                f"{point.share:>12.0%}{'  <- knee' if point is self.knee else ''}"
            )
        for value, reason in self.left_out.items():
            yield f"{value!s:>18} not measured: {reason}"
        if self.knee is not None:
            yield f"{self.name} {self.knee.value} gives {self.knee.share:.0%} of the best."


@dataclass(frozen=True)
class Levers(Described):
    """The measured effect of the three levers on a model; ``print`` shows a table for each.

    All times are measured on this computer; none is simulated.

    Attributes:
        device_iterations: Iterations per call, for the same number of replicas.
        replicas: Copies of the model, with as many device iterations as the executor has.
        inputs: Inputs from the arguments of calls, and from a queue whose thread repeats them, with
            the device iterations of the knee.
    """

    device_iterations: Lever
    replicas: Lever
    inputs: Lever

    def _all(self) -> tuple[Lever, ...]:
        return self.device_iterations, self.replicas, self.inputs

    def _figures(self) -> dict[str, object]:
        return {
            one.name: "not measured" if one.knee is None else one.knee.value for one in self._all()
        }

    def __repr__(self) -> str:
        knees = ", ".join(f"{name} {value}" for name, value in self._figures().items())
        return f"Levers(measured; knees: {knees})"

    def __str__(self) -> str:
        width = terminal_width()
        lines = ["Measured on this computer; nothing here is simulated."]
        for one in self._all():
            lines += ["", *str(one).splitlines()]
        return "\n".join(line[:width] for line in lines)


def measure_levers(
    make_twin: MakeTwin,
    device: DeviceProgram,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    training: bool,
    seconds: float,
    most_iterations: int,
    most_replicas: int,
) -> Levers:
    """Measure the three levers on copies of an executor; see ``PoplarExecutor.levers``."""
    for name, count in (("most_iterations", most_iterations), ("most_replicas", most_replicas)):
        if isinstance(count, bool) or not isinstance(count, int):
            raise UsageTypeError(f"levers({name}={count!r}): pass an int.")
        if count < 1:
            raise UsageValueError(f"levers({name}={count}): pass 1 or more.")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise UsageTypeError(f"levers(seconds={seconds!r}): pass a number.")
    if not seconds > 0:
        raise UsageValueError(f"levers(seconds={seconds}): pass a positive number.")
    if device.options.Distributed.numProcesses > 1:
        raise Error(
            "levers: several processes train the model. Call it in one process, with options "
            "without Distributed settings."
        )
    counts = loop_counts(device.options, training=training)
    batch = _Batch(args, kwargs, counts)
    with _host_random_numbers_kept():
        return _Measuring(make_twin, batch, device, training, seconds).measure(
            most_iterations, most_replicas
        )


@contextmanager
def _host_random_numbers_kept() -> Iterator[None]:
    """Restore the generators of Python, NumPy and PyTorch after this scope."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


class _Batch:
    """The arguments of a call, for any number of micro-batches.

    Args:
        args: The positional arguments of a call.
        kwargs: Its keyword arguments.
        counts: How many micro-batches they have.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], counts: LoopCounts) -> None:
        self._arguments = tuple(args), dict(kwargs)
        self._num_micro_batches = _num_inputs(counts)
        sizes = [one.shape[0] for one in tree_leaves(self._arguments) if _has_batch(one)]
        if not sizes:
            raise Error("levers: pass the arguments of a call: tensors with a batch dimension.")
        self.micro_batch = max(1, sizes[0] // self._num_micro_batches)

    def of(self, counts: LoopCounts) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments for other counts: the micro-batches repeat, or some are left out."""
        wanted, present = _num_inputs(counts), self._num_micro_batches

        def resized(tensor: torch.Tensor) -> torch.Tensor:
            if not _has_batch(tensor) or wanted == present:
                return tensor
            size = tensor.shape[0] // present * wanted
            return tensor[torch.arange(size) % tensor.shape[0]]

        found: tuple[tuple[Any, ...], dict[str, Any]]
        found = tree_map_only(torch.Tensor, resized, self._arguments)
        return found


def _has_batch(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _num_inputs(counts: LoopCounts) -> int:
    """Return the micro-batches that the arguments of a call have."""
    return counts.device_iterations * counts.gradient_accumulation * counts.num_inputs


@dataclass(frozen=True)
class _FedRequest(ModelRequest):
    """A model whose inputs come from a queue.

    Attributes:
        infeed: The queue.
    """

    infeed: InfeedQueue = field(kw_only=True)

    @property
    def fed(self) -> bool:
        """Return True."""
        return True

    def queues(self, enqueues: Mapping[int, Enqueue]) -> Queues | None:
        """Return the queue that feeds the program."""
        interface = self.interface()
        places = [_native.InputPlace(0, position) for position in range(len(interface.inputs))]
        return Queues(enqueues, [self.infeed], places, _num_inputs(interface.loop))


class _Measuring:
    """Measures one executor."""

    def __init__(
        self,
        make_twin: MakeTwin,
        batch: _Batch,
        device: DeviceProgram,
        training: bool,
        seconds: float,
    ) -> None:
        self._make_twin = make_twin
        self._batch = batch
        self._device = device
        self._options = device.options
        self._training = training
        self._seconds = seconds

    def measure(self, most_iterations: int, most_replicas: int) -> Levers:
        """Return the curves of all levers."""
        iterations = self._curve(
            _ITERATIONS,
            _doublings(most_iterations, self._options.device_iterations),
            lambda value: lambda options: options.deviceIterations(value),
        )
        if not iterations.points:
            value, reason = next(iter(iterations.left_out.items()))
            raise Error(f"levers: with deviceIterations({value}): {reason}")
        knee = iterations.knee
        assert knee is not None
        return Levers(iterations, self._replicas(most_replicas), self._inputs(int(knee.value)))

    def _replicas(self, most: int) -> Lever:
        values = _doublings(most, self._options.replication_factor)
        grouped = self._options.input_group_size != 1 or bool(self._device.replica_groups)
        if grouped:
            reason = "replicas have groups"
            return Lever(_REPLICAS, (), dict.fromkeys(values, reason))
        return self._curve(
            _REPLICAS, values, lambda value: lambda options: options.replicationFactor(value)
        )

    def _inputs(self, iterations: int) -> Lever:
        found: dict[int | str, tuple[float, float]] = {}
        left_out: dict[int | str, str] = {}
        for value, measure in ((_ARGUMENTS, self._passed), (_QUEUE, self._fed)):
            try:
                found[value] = measure(lambda options: options.deviceIterations(iterations))
            except Error as error:
                left_out[value] = _reason(error)
        return _lever(_FEED, found, left_out)

    def _curve(
        self,
        name: str,
        values: Sequence[int],
        change: Callable[[int], Callable[[Options], object]],
    ) -> Lever:
        found: dict[int | str, tuple[float, float]] = {}
        left_out: dict[int | str, str] = {}
        for value in values:
            if any(seconds > _LONG * self._seconds for seconds, _ in found.values()):
                left_out[value] = "a call takes long already"
                continue
            try:
                found[value] = self._passed(change(value))
            except Error as error:
                left_out[value] = _reason(error)
        return _lever(name, found, left_out)

    def _passed(self, change: Callable[[Options], object]) -> tuple[float, float]:
        """Measure calls with arguments; return the time of a call (s) and the rate (items/s)."""
        with self._twin(change) as twin:
            counts = self._counts(twin)
            args, kwargs = self._batch.of(counts)
            self._take(twin, twin._life.compile_model(args, kwargs))
            return self._timed(lambda: twin(*args, **kwargs), counts)

    def _fed(self, change: Callable[[Options], object]) -> tuple[float, float]:
        """Measure a program that takes its inputs from a queue that repeats the micro-batches."""
        with self._twin(change) as twin:
            counts = self._counts(twin)
            args, kwargs = self._batch.of(counts)
            request = twin._life.request(args, kwargs)
            elements = _elements(request, args, kwargs, _num_inputs(counts))
            values = {one.name: getattr(request, one.name) for one in dataclasses.fields(request)}
            infeed = InfeedQueue(elements, repeat=True)
            try:
                twin._life.check_before_compilation()
                compiled = twin._device.compile(_FedRequest(**values, infeed=infeed))
                self._take(twin, compiled, fed=True)
                return self._timed(lambda: twin._device.run([]), counts)
            finally:
                twin.destroy()
                infeed.close()

    @contextmanager
    def _twin(self, change: Callable[[Options], object]) -> Iterator[Twin]:
        twin = self._make_twin(change)
        try:
            yield twin
        finally:
            twin.destroy()

    def _counts(self, twin: Twin) -> LoopCounts:
        return loop_counts(twin._device.options, training=self._training)

    @staticmethod
    def _take(twin: Twin, compiled: CompiledModel, *, fed: bool = False) -> None:
        """Bring the program of a copy to its device.

        Raises:
            Error: The program would change a queue of the user.
        """
        if compiled.queues is not None and (compiled.queues.outfeeds or not fed):
            raise Error("the model puts tensors into a queue, which a measurement would fill")
        if not compiled.run.reads_inputs and fed:
            raise Error("the device makes its inputs (enableSyntheticData)")
        twin._life.take(compiled)

    def _timed(self, call: Callable[[], object], counts: LoopCounts) -> tuple[float, float]:
        call()  # the first call makes buffers and threads
        times: list[float] = []
        end = time.perf_counter() + self._seconds
        while len(times) < _LEAST_CALLS or time.perf_counter() < end:
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        seconds = statistics.median(times)
        per_replica = counts.device_iterations * counts.gradient_accumulation
        return seconds, per_replica * counts.replicas * self._batch.micro_batch / seconds


def _elements(
    request: ModelRequest, args: Sequence[Any], kwargs: Mapping[str, Any], count: int
) -> list[tuple[torch.Tensor, ...]]:
    """Return the micro-batches of a call as the elements of a queue."""
    interface = request.interface()
    tensors = interface.arguments.flatten(args, kwargs)
    sizes = [1 if not tensor.dim() else tensor.shape[0] // count for tensor in tensors]
    return [
        tuple(
            tensor[number * size : (number + 1) * size] if tensor.dim() else tensor
            for tensor, size in zip(tensors, sizes, strict=True)
        )
        for number in range(count)
    ]


def _doublings(most: int, present: int) -> list[int]:
    """Return 1, 2, 4, ... up to a number, and the present setting."""
    return sorted({*(2**power for power in range(most.bit_length())), present})


def _reason(error: Error) -> str:
    return error.message.splitlines()[0]


def _lever(
    name: str, found: Mapping[int | str, tuple[float, float]], left_out: Mapping[int | str, str]
) -> Lever:
    best = max((rate for _, rate in found.values()), default=1.0)
    points = (LeverPoint(value, *figures, figures[1] / best) for value, figures in found.items())
    return Lever(name, tuple(points), left_out)
