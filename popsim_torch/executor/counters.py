"""When a call read its inputs and wrote its outputs, and the latencies computed from these times.

The host measures three times in a call: when the device receives its inputs, when it begins to
compute, and when it ends. Between the first two, the device checks the inputs and looks up their
addresses: this counts as the transfer to the device. The device reads inputs and writes outputs in
place while it computes, so an output is complete when it is requested.

The micro-batches of a call get equal shares of both times. Each micro-batch counts as read at the
beginning of its share of the run, and as written at the end of that share; it is requested earlier,
by its share of the transfer time. So the stamps of one tensor never decrease, and no output is
written before its input was read. With pipelining, the result is the rate of the pipeline, not the
time that one micro-batch takes through all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from popsim_torch.anchors import kept_micro_batches
from popsim_torch.enums import OutputMode
from popsim_torch.ir import LoopCounts

__all__ = ["Latency", "PerfCounters", "RunShape", "latency", "perf_counters"]

PerfCounters: TypeAlias = dict[str, list[list[float]]]
Latency: TypeAlias = tuple[float, float, float]


@dataclass(frozen=True)
class RunShape:
    """The number of tensors and micro-batches that a call reads and writes.

    Attributes:
        loop: How often a call runs the model.
        replicas: Number of copies of the model.
        mode: The output mode: which micro-batches a call returns.
        period: The period of ``EveryN`` (device iterations).
        num_inputs: Number of input tensors.
        num_outputs: Number of output tensors.
    """

    loop: LoopCounts
    replicas: int
    mode: OutputMode
    period: int
    num_inputs: int
    num_outputs: int


def perf_counters(shape: RunShape, run: tuple[float, float, float] | None) -> PerfCounters:
    """Return the time stamps of a run in seconds; only differences between them have a meaning.

    Args:
        shape: The number of tensors and micro-batches of the call.
        run: The times of the call, of its beginning and of its end (s); None for a call that read
            and wrote nothing.

    Returns:
        ``input``, ``input_complete``, ``output`` and ``output_complete``: a list for each tensor,
        with a stamp for each micro-batch of each replica that is read or returned, in their order.
    """
    read: list[float] = []
    written: list[float] = []
    way = 0.0  # transfer time of one micro-batch to the device
    if run is not None:
        called, began, ended = run
        read, written = _stamps(shape, began, ended)
        way = (began - called) * shape.replicas / max(len(read), 1)
    return {
        "input": [[stamp - way for stamp in read] for _ in range(shape.num_inputs)],
        "input_complete": [list(read) for _ in range(shape.num_inputs)],
        "output": [list(written) for _ in range(shape.num_outputs)],
        "output_complete": [list(written) for _ in range(shape.num_outputs)],
    }


def _stamps(shape: RunShape, began: float, ended: float) -> tuple[list[float], list[float]]:
    """Return when each micro-batch is read, and when each returned micro-batch is written."""
    accumulation = shape.loop.gradient_accumulation
    count = shape.loop.device_iterations * accumulation
    bounds = [began + (ended - began) * i / count for i in range(count)] + [ended]
    iterations, steps = kept_micro_batches(
        shape.mode, shape.period, shape.loop.device_iterations, accumulation
    )
    returned = [bounds[i * accumulation + step + 1] for i in iterations for step in steps]
    return _for_each_replica(bounds[:-1], shape), _for_each_replica(returned, shape)


def _for_each_replica(stamps: Sequence[float], shape: RunShape) -> list[float]:
    # All replicas run at the same time, so they have the same stamps.
    return [stamp for stamp in stamps for _ in range(shape.replicas)]


def latency(stamps: PerfCounters, start: str, end: str) -> Latency:
    """Return the minimum, the maximum and the mean of the time between two events, in seconds.

    Each event concerns all tensors: a request happens with the first tensor, and a completion with
    the last one. The computation ends when the last output is requested. If there are more starts
    than ends, an equal number of starts belongs to each end, and the earliest of them is used.

    Args:
        stamps: The time stamps of a run.
        start: The key of the first event, such as ``input``.
        end: The key of the second event.
    """
    first = _over_tensors(stamps[start], max if start == "input_complete" else min)
    last = _over_tensors(stamps[end], max)
    if not first or not last:
        return (0.0, 0.0, 0.0)
    group = max(len(first) // len(last), 1)
    times = [
        stamp - min(first[i * group : (i + 1) * group])
        for i, stamp in enumerate(last[: len(first)])
    ]
    least, greatest = min(times), max(times)
    # Rounding may move the mean of equal numbers out of their range.
    return least, greatest, min(max(sum(times) / len(times), least), greatest)


def _over_tensors(
    stamps: Sequence[Sequence[float]], choose: Callable[[Sequence[float]], float]
) -> list[float]:
    return [choose(together) for together in zip(*stamps, strict=True)]
