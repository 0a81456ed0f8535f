"""Places the ops of a program on other stages, without another trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from popsim_torch.enums import PipelineSchedule
from popsim_torch.machine import Estimate, EstimateRequest, estimate_program
from popsim_torch.passes.recompute import recompute
from popsim_torch.passes.recompute_choice import Recomputation

__all__ = ["Candidate", "estimate_candidate"]


@dataclass(frozen=True)
class Candidate:
    """A way to run a model as a pipeline.

    Attributes:
        begins: For each stage the first of its layers.
        schedule: The schedule.
        recomputes: Whether the backward pass recomputes activations.
        accumulation: Micro-batches per weight update (inference: per call).
        proportion: The share of a tile's memory for the temporaries of products; None for that of
            the options.
    """

    begins: tuple[int, ...]
    schedule: PipelineSchedule
    recomputes: bool
    accumulation: int
    proportion: float | None = None

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.begins)

    def stages(self, num_layers: int) -> list[int]:
        """Return the stage of each layer."""
        found = []
        stage = 0
        for layer in range(num_layers):
            while stage + 1 < len(self.begins) and self.begins[stage + 1] <= layer:
                stage += 1
            found.append(stage)
        return found


def estimate_candidate(
    base: EstimateRequest, layers: Sequence[int | None], num_layers: int, candidate: Candidate
) -> Estimate:
    """Return what a program would cost with other stages.

    Args:
        base: The program on one stage, without recomputation.
        layers: The layer of each of its ops.
        num_layers: The number of layers.
        candidate: How to run it.
    """
    program = base.program.copy()
    stages = candidate.stages(num_layers)
    for op, layer in zip(program.graph.ops, layers, strict=True):
        op.stage = 0 if layer is None else stages[layer]
    if base.training:
        mode = Recomputation.PIPELINE if candidate.recomputes else Recomputation.NONE
        recompute(program.graph, mode, program.checkpoints)
    loop = base.run.loop
    if base.training:
        loop = replace(loop, gradient_accumulation=candidate.accumulation)
    else:
        loop = replace(loop, device_iterations=candidate.accumulation)
    run = replace(
        base.run,
        loop=loop,
        schedule=candidate.schedule,
        num_ipus=candidate.num_stages,
        positions=(),
        ipu_of_stage={},
    )
    request = replace(base, program=program, run=run)
    if candidate.proportion is not None:
        shares = dict.fromkeys(range(candidate.num_stages), candidate.proportion)
        request = replace(request, proportions=shares)
    return estimate_program(request)
