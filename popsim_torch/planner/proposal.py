"""``PipelinePlan``: the proposal of ``popsim_torch.plan``, with the alternatives it weighed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from popsim_torch.enums import PipelineSchedule
from popsim_torch.machine import Estimate
from popsim_torch.machine.figures import amount, grade_of, percent, shares, size, time
from popsim_torch.options import Options
from popsim_torch.planner.restage import Candidate
from popsim_torch.planner.search import Alternative
from popsim_torch.stages import ShardedExecution, set_pipeline_stage_assignment
from popsim_torch.stages.strategies import PipelinedExecution
from popsim_torch.tables import Described, terminal_width

__all__ = ["PipelinePlan", "PlannedStage"]

_SHOWN = 12


@dataclass(frozen=True)
class PlannedStage:
    """A stage of a plan.

    Attributes:
        stage: Its number.
        layers: The names of its modules, in the order in which they run.
        forward: The simulated cycles of its forward pass for one micro-batch.
        backward: The simulated cycles of its backward pass, with recomputation.
        use: The share of time in which its IPU works.
        peak_bytes: The memory of the fullest tile.
        verdict: ``fits``, ``close`` or ``does not fit``.
    """

    stage: int
    layers: tuple[str, ...]
    forward: float
    backward: float
    use: float
    peak_bytes: int
    verdict: str


@dataclass(frozen=True)
class PipelinePlan(Described):
    """How to run a model on several IPUs; all times and sizes are simulated.

    ``print`` shows the stages, what binds, and the alternatives.

    Attributes:
        stages: The stages.
        schedule: The schedule.
        recomputes: Whether the backward pass recomputes activations.
        accumulation: Micro-batches per weight update; for inference device iterations.
        proportion: The share of a tile's memory for the temporaries of products; None for that of
            the options.
        estimate: What it costs.
        alternatives: Everything that was weighed, the best first.
        even: The same settings with equally many layers on each stage.
        binding: What keeps it from being faster.
        training: Whether the model trains.
    """

    stages: tuple[PlannedStage, ...]
    schedule: PipelineSchedule
    recomputes: bool
    accumulation: int
    proportion: float | None
    estimate: Estimate
    alternatives: tuple[Alternative, ...] = field(repr=False)
    even: Alternative = field(repr=False)
    binding: str
    training: bool

    @classmethod
    def of(
        cls,
        found: Sequence[Alternative],
        even: Alternative,
        estimate: Estimate,
        names: Sequence[str],
    ) -> PipelinePlan:
        """Return the plan of the best alternative.

        Args:
            found: What was weighed, the best first.
            even: The even split with the same settings.
            estimate: What the best one costs.
            names: The names of the layers.
        """
        best = found[0]
        return cls(
            stages=tuple(_stages(best.candidate, estimate, names)),
            schedule=best.candidate.schedule,
            recomputes=best.candidate.recomputes,
            accumulation=best.candidate.accumulation,
            proportion=best.candidate.proportion,
            estimate=estimate,
            alternatives=tuple(found),
            even=even,
            binding=_binding(estimate),
            training=estimate.training,
        )

    @property
    def verdict(self) -> str:
        """Whether the memory suffices: ``fits``, ``close`` or ``does not fit``."""
        return self.estimate.verdict

    @property
    def seconds(self) -> float:
        """The simulated time of a micro-batch (s)."""
        return self.alternatives[0].seconds

    @property
    def assignment(self) -> dict[str, int]:
        """The stage of each layer, for ``set_pipeline_stage_assignment``."""
        return {name: stage.stage for stage in self.stages for name in stage.layers}

    def apply(self, model: nn.Module, options: Options) -> None:
        """Assign the stages to a model, and set the options that the plan proposes.

        Args:
            model: The model that was planned for, not yet wrapped.
            options: Receives the strategy, the schedule, the recomputation and the accumulation,
                and ``autoRoundNumIPUs`` if the number of stages is no power of two.

        Raises:
            UsageValueError: The model does not have these layers.
        """
        count = len(self.stages)
        if self.proportion is not None:
            share = self.proportion
            options.setAvailableMemoryProportion({f"IPU{ipu}": share for ipu in range(count)})
        if count > 1:
            set_pipeline_stage_assignment(model, self.assignment)
        if self.training:
            options.Training.gradientAccumulation(self.accumulation)
            options._Popart.set("autoRecomputation", 3 if self.recomputes else 0)
        else:
            options.deviceIterations(max(self.accumulation, options.device_iterations))
        if count == 1:
            return
        if count & (count - 1):
            options.autoRoundNumIPUs(True)  # machines hand out powers of two
        if self.schedule == PipelineSchedule.Sequential:
            options.setExecutionStrategy(ShardedExecution())
        else:
            options.setExecutionStrategy(PipelinedExecution())
            options.pipelineSchedule(self.schedule)

    @property
    def _grade(self) -> str:
        return grade_of(self.estimate.grades)

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._figures().items())
        return f"PipelinePlan(simulated; {facts})"

    def _figures(self) -> dict[str, object]:
        speed = self.even.seconds / self.seconds if self.seconds else 1.0
        return {
            "IPUs": len(self.stages),
            "schedule": self.schedule.name,
            "recomputation": "yes" if self.recomputes else "no",
            "accumulation" if self.training else "device iterations": self.accumulation,
            **({} if self.proportion is None else {"for temporaries": f"{self.proportion:.0%}"}),
            "time of a micro-batch": time(self.seconds, self._grade),
            "grades": shares(self.estimate.grades),
            "verdict": self.verdict,
            "even split": f"{speed:.2f} times as long, {self.even.verdict}",
            "binding": self.binding,
        }

    def __str__(self) -> str:
        width = terminal_width()
        return "\n".join(line[:width] for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield "Simulated: how this model would run on IPUs."
        for name, value in self._figures().items():
            yield f"{name:<24}{value}"
        yield ""
        yield (
            f"{'stage':>5} {'use':>6} {'forward':>8} {'backward':>8} {'a tile':>9}  "
            f"{'verdict':<13} layers (cycles of a micro-batch)"
        )
        for one in self.stages:
            layers = one.layers[0] if one.layers else ""
            if len(one.layers) > 1:
                layers += f" .. {one.layers[-1]} ({len(one.layers)})"
            yield (
                f"{one.stage:>5} {percent(one.use):>6} {amount(one.forward, self._grade):>8} "
                f"{amount(one.backward, self._grade):>8} {size(one.peak_bytes):>9}  "
                f"{one.verdict:<13} {layers}"
            )
        yield ""
        yield (
            f"{'time':>8} {'IPUs':>4} {'schedule':<12} {'recompute':<9} {'count':>6} "
            f"{'a tile':>9}  {'verdict':<13} first layers of the stages"
        )
        for alternative in self.alternatives[:_SHOWN]:
            yield self._row(alternative)
        if len(self.alternatives) > _SHOWN:
            yield f"{'':>8} ... {len(self.alternatives)} alternatives in all"

    def _row(self, one: Alternative) -> str:
        candidate = one.candidate
        begins = ",".join(map(str, candidate.begins))
        return (
            f"{time(one.seconds, self._grade):>8} {candidate.num_stages:>4} "
            f"{candidate.schedule.name:<12} {'yes' if candidate.recomputes else 'no':<9} "
            f"{candidate.accumulation:>6} {size(one.peak_bytes):>9}  {one.verdict:<13} "
            f"{begins} {one.label}"
        )


def _stages(
    candidate: Candidate, estimate: Estimate, names: Sequence[str]
) -> Iterator[PlannedStage]:
    begins = (*candidate.begins, len(names))
    sums: dict[tuple[int, str], float] = {}
    for op in estimate.ops:
        key = op.stage, op.phase
        sums[key] = sums.get(key, 0.0) + op.cycles
    for ipu in estimate.ipus:
        stage = ipu.ipu
        yield PlannedStage(
            stage=stage,
            layers=tuple(names[begins[stage] : begins[stage + 1]]),
            forward=sums.get((stage, "forward"), 0.0),
            backward=sums.get((stage, "backward"), 0.0),
            use=ipu.use,
            peak_bytes=ipu.memory.peak,
            verdict=ipu.memory.verdict,
        )


def _binding(estimate: Estimate) -> str:
    """Return what keeps a plan from being faster, in words."""
    full = max(estimate.ipus, key=lambda ipu: ipu.memory.peak)
    share = full.memory.peak / full.memory.capacity
    if estimate.verdict == "does not fit":
        return (
            f"memory: IPU {full.ipu} needs {share:.0%} of its tiles. Use more IPUs, a smaller "
            "micro-batch, or Options.TensorLocations to keep states off the chip"
        )
    busy = estimate.busiest
    parts: dict[str, Any] = {
        "the host's data": busy.parts.host,
        "copies between IPUs": busy.parts.links,
        "the weight update": busy.parts.update + busy.parts.all_reduce,
        "waiting while the pipeline fills and drains": busy.parts.waiting,
        f"the computation of IPU {busy.ipu}": busy.parts.compute
        + busy.parts.exchange
        + busy.parts.sync
        + busy.parts.glue,
    }
    name = max(parts, key=lambda one: parts[one])
    return f"{name} ({parts[name] / (sum(parts.values()) or 1):.0%}); memory {share:.0%}"
