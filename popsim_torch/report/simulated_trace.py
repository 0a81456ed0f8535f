"""The simulated part of a trace: what each IPU would do in the recorded calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from popsim_torch.report.modules import OpCost
from popsim_torch.report.trace_events import Event, Events

__all__ = ["CUTS", "Cut", "SimulatedTrace", "num_events"]

HOST = 900
"""The number of the process of the simulated host."""
_ROWS = {
    "forward": 2,
    "backward": 3,
    "update": 4,
    "waiting": 5,
    "copies forward": 6,
    "copies backward": 7,
    "all-reduce": 8,
    "left out": 9,
}
_COUNTER = "memory of the fullest tile"


@dataclass(frozen=True)
class Cut:
    """What a trace leaves out, to stay small.

    Attributes:
        periods: How often a part of the schedule that repeats is shown; None for always.
        iterations: How many device iterations of a call are shown; None for all.
        ops: Ops are shown in ``all`` actions, in the ``first`` of each kind, or in ``no`` action.
        runs: How many calls are shown; None for all.
        text: What to say about it.
    """

    periods: int | None = None
    iterations: int | None = None
    ops: str = "all"
    runs: int | None = None
    text: str = ""


_SHORT = "fill, two periods and drain of two device iterations of each call"
CUTS = (
    Cut(),
    Cut(2, 2, "all", None, f"{_SHORT}; the rest repeats"),
    Cut(2, 2, "first", None, f"{_SHORT}, ops in the first action of each stage"),
    Cut(2, 1, "first", 1, "fill, two periods and drain of the first call, ops as above"),
    Cut(2, 1, "no", 1, "fill, two periods and drain of the first call, without ops"),
)
"""What to leave out, from nothing to most."""


def num_events(estimate: Mapping[str, Any], runs: int, cut: Cut) -> int:
    """Return how many events a trace will have, without making them.

    Args:
        estimate: The estimate.
        runs: The number of calls.
        cut: What is left out.
    """
    sizes: dict[tuple[str, int | None], int] = {}
    for op in estimate["ops"]:
        key = op["phase"], op["ipu"] if op["phase"] == "update" else op["stage"]
        sizes[key] = sizes.get(key, 0) + 1
    actions = 0
    with_ops = 0
    for stretch in estimate["schedule"]["stretches"]:
        times = _kept(stretch["times"], cut.periods)
        for slot in stretch["slots"]:
            # (with what follows of it: waiting, a copy and its arrow)
            actions += times * 3 * len(slot["actions"])
            for one in slot["actions"]:
                owner = one["ipu"] if one["kind"] == "update" else one["stage"]
                with_ops += times * sizes.get((one["kind"], owner), 0)
    iterations = _kept(_iterations(estimate), cut.iterations) * _kept(max(runs, 1), cut.runs)
    shown = {"all": iterations * with_ops, "first": len(estimate["ops"]), "no": 0}
    return iterations * (actions + 2 * len(estimate["ipus"])) + shown[cut.ops]


def _kept(number: int, most: int | None) -> int:
    return number if most is None else min(number, most)


def _iterations(estimate: Mapping[str, Any]) -> int:
    """Return how often the schedule runs in a call; in inference it covers the whole call."""
    return int(estimate["batch"]["device_iterations"]) if estimate["training"] else 1


class SimulatedTrace:
    """Adds what the IPUs of a replica do to a trace.

    Args:
        events: The trace.
        estimate: The estimate.
        ops: Its ops.
        cut: What is left out.
    """

    def __init__(
        self, events: Events, estimate: Mapping[str, Any], ops: Sequence[OpCost], cut: Cut
    ) -> None:
        self._events, self._estimate, self._cut = events, estimate, cut
        self._us = 1e6 / estimate["device"]["clock_hz"]
        self._ipus = [one["ipu"] for one in estimate["ipus"]]
        self._ops: dict[tuple[str, int | None], list[tuple[int, OpCost]]] = {}
        for place, op in enumerate(ops):
            owner = op.ipu if op.phase == "update" else op.stage
            self._ops.setdefault((op.phase, owner), []).append((place, op))
        self._memory = {
            one["ipu"]: {int(op): worst for op, worst, _ in one["liveness"]}
            for one in estimate["ipus"]
        }
        self._links = {(one["direction"], one["from"], one["to"]): one for one in estimate["links"]}
        self._stages = {stage: one["ipu"] for one in estimate["ipus"] for stage in one["stages"]}
        self._detailed: set[tuple[str, int | None]] = set()
        self._counted: set[tuple[str, int | None]] = set()
        # Where the copies of an action go to: from (kind, stage, micro-batch) of the receiver.
        self._copies: dict[tuple[str, int, int], Event] = {}
        self._free: dict[tuple[int, int], float] = {}
        self._reduces = 0.0

    def add(self, runs: int) -> None:
        """Add the calls, one after the other.

        Args:
            runs: The number of recorded calls; without any, one call is shown.
        """
        for ipu in self._ipus:
            self._events.process(ipu, f"IPU {ipu} (simulated)")
        self._events.process(HOST, "host (simulated)")
        now = 0.0
        for run in range(_kept(max(runs, 1), self._cut.runs)):
            now = self._call(now, run)

    def _call(self, now: float, run: int) -> float:
        iterations = _iterations(self._estimate)
        run_cycles = self._estimate["update"]["cycles"]
        around = self._estimate["call"]["cycles"] - iterations * run_cycles
        if around * self._us > 1e-3:
            self._events.thread(HOST, 1, "calls")
            args = {"cycles": around, "call": run}
            self._events.work(
                HOST, 1, f"begin of call {run}", now * self._us, around * self._us, args
            )
            now += around
        shown = _kept(iterations, self._cut.iterations)
        began = now
        for _ in range(shown):
            self._copies.clear()
            now = self._iteration(now)
        if shown and iterations > shown:
            rest = iterations - shown
            now = self._left_out(now, rest * (now - began) / shown, f"{rest} device iterations")
        return now

    def _iteration(self, now: float) -> float:
        """Add one run of the schedule: in training the micro-batches of a weight update."""
        schedule = self._estimate["schedule"]
        self._reduces = schedule["all_reduce_cycles"]
        for stretch in schedule["stretches"]:
            now = self._stretch(stretch, now)
        return self._all_reduce(now)

    def _all_reduce(self, now: float) -> float:
        """Add the sum of gradients over replicas, once; it comes before the weight update."""
        cycles, self._reduces = self._reduces, 0.0
        if cycles:
            for ipu in self._ipus:
                self._action(ipu, "all-reduce", "all-reduce of gradients", now, cycles)
        return now + cycles

    def _stretch(self, stretch: Mapping[str, Any], now: float) -> float:
        times, began = stretch["times"], now
        shown = _kept(times, self._cut.periods)
        steps: dict[tuple[str, int | None], int] = {}
        for slot in stretch["slots"]:
            for one in slot["actions"]:
                key = one["kind"], one["stage"]
                steps[key] = steps.get(key, 0) + 1
        for time in range(shown):
            for slot in stretch["slots"]:
                now = self._slot(slot, now, time, steps)
        if shown and times > shown:
            rest = times - shown
            now = self._left_out(now, rest * (now - began) / shown, f"{rest} periods")
        return now

    def _slot(
        self,
        slot: Mapping[str, Any],
        now: float,
        time: int,
        steps: Mapping[tuple[str, int | None], int],
    ) -> float:
        if any(one["kind"] == "update" for one in slot["actions"]):
            now = self._all_reduce(now)
        ends = dict.fromkeys(self._ipus, now)
        for one in slot["actions"]:
            kind, ipu = one["kind"], one["ipu"]
            # An update is that of all stages of the IPU.
            stage = None if kind == "update" else one["stage"]
            micro_batch = one["micro_batch"]
            if micro_batch is not None:
                micro_batch += time * steps[kind, one["stage"]]
            begin = ends.get(ipu, now)
            label = "weight update" if kind == "update" else kind
            if micro_batch is not None:
                label = f"{kind} {micro_batch}"
            event = self._action(ipu, kind, label, begin, one["cycles"], stage, micro_batch)
            self._inside(event, (kind, ipu if stage is None else stage), begin, one["cycles"])
            ends[ipu] = begin + one["cycles"]
            self._arrive(event, kind, stage, micro_batch)
            self._copy(kind, stage, ipu, micro_batch, ends[ipu])
        # (the copies at the end of a slot are a part of it)
        end = now + float(slot["cycles"])
        for ipu, own in ends.items():
            self._wait(ipu, own, end - own)
        return end

    def _action(
        self,
        ipu: int,
        row: str,
        name: str,
        begin: float,
        cycles: float,
        stage: int | None = None,
        micro_batch: int | None = None,
    ) -> Event:
        tid = _ROWS.get(row, _ROWS["forward"])
        self._events.thread(ipu, tid, row)
        args: dict[str, Any] = {"cycles": cycles}
        if stage is not None:
            args["stage"] = stage
        if micro_batch is not None:
            args["micro_batch"] = micro_batch
        self._free[ipu, tid] = begin + cycles
        return self._events.work(ipu, tid, name, begin * self._us, cycles * self._us, args)

    def _inside(
        self, event: Event, key: tuple[str, int | None], begin: float, cycles: float
    ) -> None:
        """Add the ops of an action inside of it, and the memory while they run.

        An action is longer than its ops by the host's streams, which come first.
        """
        wanted = self._cut.ops == "all" or (self._cut.ops == "first" and key not in self._detailed)
        ops = self._ops.get(key, [])
        total = sum(op.cycles for _, op in ops)
        if not wanted or not ops:
            return
        self._detailed.add(key)
        counts = key not in self._counted
        self._counted.add(key)
        scale = min(1.0, cycles / total) if total else 1.0
        pid, tid, now = event["pid"], event["tid"], begin
        streams = cycles - total
        if streams * self._us > 1e-3:
            self._events.work(
                pid, tid, "host streams", now * self._us, streams * self._us, {"cycles": streams}
            )
            now += streams
        for place, op in ops:
            if counts and place in self._memory.get(pid, {}):
                self._events.counter(pid, _COUNTER, now * self._us, self._memory[pid][place])
            if op.cycles:
                args = {"cycles": op.cycles, "grade": op.grade, "module": op.module}
                long = op.cycles * scale
                self._events.work(pid, tid, op.name, now * self._us, long * self._us, args)
                now += long

    def _wait(self, ipu: int, begin: float, cycles: float) -> None:
        if cycles * self._us > 1e-3:
            self._action(ipu, "waiting", "waits", begin, cycles)

    def _copy(
        self, kind: str, stage: int | None, ipu: int, micro_batch: int | None, end: float
    ) -> None:
        """Add the copy of an action's results to the IPU of the next stage, if that is another."""
        if stage is None or kind not in ("forward", "backward"):
            return
        other = stage + (1 if kind == "forward" else -1)
        link = self._links.get((kind, ipu, self._stages.get(other, ipu)))
        if link is None:
            return
        row = f"copies {kind}"
        begin = max(end, self._free.get((ipu, _ROWS[row]), 0.0))
        event = self._action(ipu, row, f"to IPU {link['to']}", begin, link["cycles"], stage)
        event["args"]["bytes"] = link["bytes"]
        if micro_batch is not None:
            self._copies[kind, other, micro_batch] = event

    def _arrive(self, event: Event, kind: str, stage: int | None, micro_batch: int | None) -> None:
        if stage is None or micro_batch is None:
            return
        source = self._copies.pop((kind, stage, micro_batch), None)
        if source is not None and source["ts"] <= event["ts"]:
            self._events.flow(source, event)

    def _left_out(self, now: float, cycles: float, what: str) -> float:
        for ipu in self._ipus:
            self._action(ipu, "left out", f"left out: {what}, as before", now, cycles)
        self._copies.clear()
        return now + cycles
