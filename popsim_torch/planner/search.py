"""Looks for the stages, the schedule, the recomputation and the accumulation that cost least."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from popsim_torch.enums import PipelineSchedule
from popsim_torch.errors import Error
from popsim_torch.machine import Estimate, EstimateRequest
from popsim_torch.machine.parts import VERDICTS
from popsim_torch.planner.layers import Layer, layer_of_ops
from popsim_torch.planner.restage import Candidate, estimate_candidate
from popsim_torch.stages.schedules import count_rule, micro_batches_in_flight

__all__ = ["Alternative", "Search"]

_SCHEDULES = (
    PipelineSchedule.Default,
    PipelineSchedule.Grouped,
    PipelineSchedule.Interleaved,
    PipelineSchedule.Sequential,
)
_USE = 0.9
"""The share of time in which the pipeline must be full, if the plan chooses the accumulation."""
_MOVES = 4
"""How often boundaries between stages move before the search ends."""
_SHARES = (0.25, 0.12)
"""Shares of memory for temporaries that are tried if nothing fits with the given one."""
_NEAREST = 16
"""How many alternatives, of those that come nearest, are tried with each of these shares."""
_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of memory, as opposed to time, in the measure that the first boundaries balance."""


@dataclass(frozen=True)
class Alternative:
    """A way to run the model that was weighed, with its simulated cost.

    Attributes:
        candidate: The stages and the settings.
        seconds: The time of one micro-batch in a weight update (s).
        peak_bytes: The memory that the fullest tile needs.
        verdict: ``fits``, ``close`` or ``does not fit``.
        label: ``even split``, or how it was found.
    """

    candidate: Candidate
    seconds: float
    peak_bytes: int
    verdict: str
    label: str = ""

    @property
    def fits(self) -> bool:
        """Whether the memory suffices, or nearly does."""
        return self.verdict != VERDICTS[-1]

    @property
    def rank(self) -> tuple[int, float, int]:
        """Smaller is better: first what fits surely, then time, then fewer IPUs."""
        measure = self.seconds if self.fits else self.peak_bytes
        return VERDICTS.index(self.verdict), measure, self.candidate.num_stages


class Search:
    """Weighs ways to run a program.

    Args:
        base: The program on one stage, without recomputation.
        layers: Its layers.
        num_ipus: The largest number of stages.
        accumulation: The number of micro-batches per weight update; None to choose it.
    """

    def __init__(
        self,
        base: EstimateRequest,
        layers: Sequence[Layer],
        num_ipus: int,
        accumulation: int | None,
    ) -> None:
        self._base = base
        self._layers = layers
        self._num_ipus = min(num_ipus, len(layers))
        self._accumulation = accumulation
        self._of_ops = layer_of_ops(base.program, [one.name for one in layers])
        self._known: dict[Candidate, Alternative] = {}

    def run(self) -> list[Alternative]:
        """Return all alternatives, the best one first."""
        for num_stages in range(1, self._num_ipus + 1):
            for schedule, recomputes in self._settings(num_stages):
                accumulation = self._count(num_stages, schedule)
                if accumulation is None:
                    continue
                for begins, label in self._boundaries(num_stages):
                    self._weigh(Candidate(begins, schedule, recomputes, accumulation), label)
        if not self._known:
            raise Error(
                f"plan: no schedule runs {self._accumulation} micro-batches. Pass another "
                "accumulation, or leave it out."
            )
        for share in _SHARES:
            if self._best.fits:
                break
            nearest = sorted(self._known.values(), key=lambda one: one.rank)[:_NEAREST]
            for one in nearest:
                smaller = replace(one.candidate, proportion=share)
                self._weigh(smaller, f"{share:.0%} for temporaries")
        for _ in range(_MOVES):
            best = self._best
            for begins in self._neighbours(best.candidate.begins):
                self._weigh(replace(best.candidate, begins=begins), "boundary moved")
            if self._best is best:
                break
        return sorted(self._known.values(), key=lambda one: one.rank)

    @property
    def _best(self) -> Alternative:
        return min(self._known.values(), key=lambda one: one.rank)

    def even(self, like: Candidate) -> Alternative:
        """Return the same number of layers on each stage, with the settings of a candidate."""
        begins = _even(len(self._layers), like.num_stages)
        return self._weigh(replace(like, begins=begins), "even split")

    def _settings(self, num_stages: int) -> Iterator[tuple[PipelineSchedule, bool]]:
        schedules: Iterable[PipelineSchedule] = _SCHEDULES
        if num_stages == 1:
            schedules = (PipelineSchedule.Sequential,)
        elif not self._base.training:
            schedules = (PipelineSchedule.Default,)
        choices = (False, True) if self._base.training else (False,)
        return itertools.product(schedules, choices)

    def _count(self, num_stages: int, schedule: PipelineSchedule) -> int | None:
        """Return how many micro-batches a schedule runs; None if it cannot run the given number."""
        training = self._base.training
        if num_stages == 1:
            return self._accumulation or 1
        if schedule == PipelineSchedule.Default:
            step, least = 1, micro_batches_in_flight(schedule, num_stages, training=training)
        else:
            step = least = count_rule(schedule, num_stages, training=training)
        if self._accumulation is not None:
            given = self._accumulation
            return given if given >= least and given % step == 0 else None
        # A run is a + b x count long, where a fills, drains and updates.
        wait = 2 * num_stages - 2 if training else num_stages - 1
        enough = math.ceil(wait * _USE / (1 - _USE))
        return max(least, math.ceil(enough / step) * step)

    def _boundaries(self, num_stages: int) -> Iterator[tuple[tuple[int, ...], str]]:
        yield _even(len(self._layers), num_stages), "even split"
        times = [one.cycles for one in self._layers]
        sizes = self._sizes()
        for weight in _WEIGHTS:
            mixed = [
                (1 - weight) * time / (sum(times) or 1) + weight * size / (sum(sizes) or 1)
                for time, size in zip(times, sizes, strict=True)
            ]
            label = "balanced time" if not weight else f"balanced, {weight:.0%} memory"
            yield _balanced(mixed, num_stages), label

    def _sizes(self) -> list[float]:
        """Return the bytes that each layer keeps: weights, states, activations."""
        graph = self._base.program.graph
        owners: dict[int, int] = {}
        for index, layer in enumerate(self._of_ops):
            if layer is not None:
                op = graph.ops[index]
                for root in graph.roots((*op.inputs, *op.outputs)):
                    owners.setdefault(root.id, layer)
        sizes = [0.0] * len(self._layers)
        for tensor, layer in owners.items():
            one = graph.tensors[tensor]
            sizes[layer] += one.numel * one.dtype.itemsize
        return sizes

    def _neighbours(self, begins: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for place in range(1, len(begins)):
            for step in (-1, 1):
                moved = [*begins[:place], begins[place] + step, *begins[place + 1 :]]
                inside = all(a < b for a, b in itertools.pairwise([*moved, len(self._layers)]))
                if inside:
                    yield tuple(moved)

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return what a candidate costs."""
        return estimate_candidate(self._base, self._of_ops, len(self._layers), candidate)

    def _weigh(self, candidate: Candidate, label: str) -> Alternative:
        found = self._known.get(candidate)
        if found is None:
            cost = self.estimate(candidate)
            seconds = cost.update_cycles / cost.device.clock_hz / candidate.accumulation
            found = Alternative(candidate, seconds, cost.peak_bytes, cost.verdict, label)
            self._known[candidate] = found
        return found


def _even(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return stages with equally many layers; the first ones have the rest."""
    size, rest = divmod(num_layers, num_stages)
    begins = itertools.accumulate((size + (s < rest) for s in range(num_stages - 1)), initial=0)
    return tuple(begins)


def _balanced(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return the first layer of each stage, with the smallest possible largest stage."""
    sums = [0.0, *itertools.accumulate(costs)]
    count = len(costs)
    best: list[tuple[float, tuple[int, ...]]] = [(sums[end], (0,)) for end in range(count + 1)]
    for stage in range(1, num_stages):
        longer: list[tuple[float, tuple[int, ...]]] = [(math.inf, ())] * (count + 1)
        for end in range(stage + 1, count + 1):
            longer[end] = min(
                (max(best[begin][0], sums[end] - sums[begin]), (*best[begin][1], begin))
                for begin in range(stage, end)
            )
        best = longer
    return best[count][1]
