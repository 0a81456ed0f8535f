"""Measures contenders alternately, so that other load on the machine affects all of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from benchmarks.common.disturbance import Disturbance

PATIENCE = 15.0
"""Seconds that one comparison waits for undisturbed moments."""

ENOUGH_SECONDS = 8.0
"""A comparison that has taken so long ends before its last round, if it had enough rounds."""
ENOUGH_ROUNDS = 3

SETTLING = 0.01
"""Seconds before each turn: threads of OpenMP wait for their next work on a core for about 5 ms."""

Call = Callable[[], object]


def seconds_per_call(
    call: Call, num_calls: int, before: Call | None = None, *, of_processor: bool = False
) -> float:
    """Return the mean time of some calls in seconds, without the preparation before each call.

    Args:
        call: What is measured.
        num_calls: How often it is called.
        before: What is called before each call.
        of_processor: Count the processor time of this process, not the time that passes.
    """
    if before is not None:
        turns = (_seconds_behind(before, call, of_processor=of_processor) for _ in range(num_calls))
        return sum(turns) / num_calls
    now = time.process_time if of_processor else time.perf_counter
    start = now()
    for _ in range(num_calls):
        call()
    return (now() - start) / num_calls


def _seconds_behind(before: Call, call: Call, *, of_processor: bool) -> float:
    before()
    return seconds_per_call(call, 1, of_processor=of_processor)


def calls_per_round(call: Call, round_seconds: float = 0.05, before: Call | None = None) -> int:
    """Return the number of calls that takes about this number of seconds; at least one."""
    if seconds_per_call(call, 1, before) > round_seconds:
        return 1
    return max(1, int(round_seconds / seconds_per_call(call, 2, before)))


def fastest(call: Call, num_calls: int) -> float:
    """Return the shortest time of some calls, in seconds: the best that the machine can do."""
    return min(seconds_per_call(call, 1) for _ in range(num_calls))


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Keep one contender's time free from the collection of another contender's garbage."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _settle(call: Call, num_calls: int, before: Call | None) -> None:
    """Begin the turn of a contender when the threads of the one before it have left the cores."""
    time.sleep(SETTLING)
    if num_calls > 1:  # then its own threads wake up again, and its data returns to the caches
        seconds_per_call(call, 1, before)


def medians(
    contenders: Mapping[str, Call],
    rounds: int,
    round_seconds: float = 0.05,
    before: Mapping[str, Call] | None = None,
    *,
    of_processor: bool = False,
) -> dict[str, float]:
    """Return each contender's median time per call, in seconds.

    It measures several rounds, as far as possible while the machine is undisturbed.

    Args:
        contenders: The functions to call, by name. Each has been called before.
        rounds: How often each contender is measured; less often if their calls take seconds
            (``ENOUGH_SECONDS``).
        round_seconds: About how long each measurement takes; at least one call.
        before: Functions to call before each call of a contender, by its name; they are not timed.
        of_processor: Count the processor time of this process, which other programs do not change:
            for contenders with one thread.
    """
    first = before or {}
    num_calls = {
        name: calls_per_round(call, round_seconds, first.get(name))
        for name, call in contenders.items()
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    disturbance = Disturbance(PATIENCE) if rounds > 1 else None
    fewest, end = min(rounds, ENOUGH_ROUNDS), time.perf_counter() + ENOUGH_SECONDS
    with _without_garbage_collection():
        while (done := len(times[next(iter(times))])) < rounds:
            if done >= fewest and time.perf_counter() > end:
                break
            if disturbance:
                disturbance.wait()
            start = time.perf_counter()
            turns = {}
            for name, call in contenders.items():
                prepare = first.get(name)
                _settle(call, num_calls[name], prepare)
                turns[name] = seconds_per_call(
                    call, num_calls[name], prepare, of_processor=of_processor
                )
            if disturbance and disturbance.spoilt(time.perf_counter() - start):
                continue
            for name, seconds in turns.items():
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def check_agreement(
    contenders: Mapping[str, Callable[[], torch.Tensor]], num_calls: int, tolerance: float
) -> None:
    """Call each contender a few times and compare their results.

    Raises:
        AssertionError: Two contenders do not compute the same results.
    """
    expected: list[torch.Tensor] = []
    for name, call in contenders.items():
        results = [call().float() for _ in range(num_calls)]
        expected = expected or results
        for ours, theirs in zip(results, expected, strict=True):
            torch.testing.assert_close(
                ours,
                theirs,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, n=name: f"{n}: {text}",
            )
