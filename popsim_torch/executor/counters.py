"""When a call's inputs were read and its outputs written, and the latencies that follow.

Three moments of a call are measured, on the host, which costs it as many readings of the clock:
when the device is handed its inputs, when it begins to compute, and when it has ended. In between
the first two it looks at the inputs and finds out where they lie: that is their way to the device.
It reads inputs and writes outputs in place while it computes, so an output is complete in the
moment in which it is requested.

The micro-batches of a call take equal shares of both times. Each is taken to be read at the
beginning of its share of the run and written at the end, and to be requested its share of the other
time earlier. So stamps of one tensor never decrease, and nothing is written before it was read.
With pipelining this is the pace of the pipeline, not the way of one micro-batch through it.
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
    """What a call reads and writes.

    Attributes:
        loop: How often it runs the model.
        replicas: Copies of the model (count).
        mode: Which micro-batches it returns.
        period: Of ``EveryN`` (device iterations).
        num_inputs: Tensors that it reads (count).
        num_outputs: Tensors that it returns (count).
    """

    loop: LoopCounts
    replicas: int
    mode: OutputMode
    period: int
    num_inputs: int
    num_outputs: int


def perf_counters(shape: RunShape, run: tuple[float, float, float] | None) -> PerfCounters:
    """Return the stamps of a run, in seconds; only their differences mean anything.

    Args:
        shape: What a call reads and writes.
        run: When it was called, began and ended, in seconds; None for a call that read and wrote
            nothing.

    Returns:
        ``input``, ``input_complete``, ``output`` and ``output_complete``: a list for each tensor,
        with a stamp for each micro-batch of each replica that is read or returned, in their order.
    """
    read: list[float] = []
    written: list[float] = []
    way = 0.0  # of one micro-batch to the device
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
    """Return when each micro-batch is read, and when each one that comes back is written."""
    accumulation = shape.loop.gradient_accumulation
    count = shape.loop.device_iterations * accumulation
    bounds = [began + (ended - began) * i / count for i in range(count)] + [ended]
    iterations, steps = kept_micro_batches(
        shape.mode, shape.period, shape.loop.device_iterations, accumulation
    )
    returned = [bounds[i * accumulation + step + 1] for i in iterations for step in steps]
    return _for_each_replica(bounds[:-1], shape), _for_each_replica(returned, shape)


def _for_each_replica(stamps: Sequence[float], shape: RunShape) -> list[float]:
    # Replicas run side by side.
    return [stamp for stamp in stamps for _ in range(shape.replicas)]


def latency(stamps: PerfCounters, start: str, end: str) -> Latency:
    """Return the least, the greatest and the mean time between two events, in seconds.

    Each event is that of all tensors: of what is requested counts the first one, of what is
    complete the last one; the end of computing is when the last output is requested. Where there
    are more starts than ends, as many starts belong to each end, and the earliest counts.

    Args:
        stamps: The stamps of a run.
        start: Which of them are the beginning, such as ``input``.
        end: Which of them are the end.
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
    # The mean of equal numbers may miss them by a rounding.
    return least, greatest, min(max(sum(times) / len(times), least), greatest)


def _over_tensors(
    stamps: Sequence[Sequence[float]], choose: Callable[[Sequence[float]], float]
) -> list[float]:
    return [choose(together) for together in zip(*stamps, strict=True)]
