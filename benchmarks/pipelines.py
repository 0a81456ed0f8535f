"""How much faster is a pipeline whose stages run at the same time?

The same layers train in three ways, with the threads that PyTorch has: without stages, where all
threads share the work of each op; as a pipeline on one thread; and as a pipeline whose stages have
a thread each. Small ops leave nothing to share: there a pipeline is the way to use several cores.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
from torch import nn

import popsim_torch as poptorch
from benchmarks.common.clock import medians
from benchmarks.common.report import Table, describe_machine, make_parser

LAYERS = 8
# Features of each layer, samples of a micro-batch, micro-batches of an update, stages.
CASES = ((96, 8, 64, 2), (256, 16, 32, 2), (768, 64, 16, 2))


class Layers(nn.Module):
    """Linear layers with ReLU, and a loss."""

    def __init__(self, width: int, stages: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = [(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)]
        self.layers = nn.Sequential(*(layer for part in parts for layer in part))
        if stages > 1:
            count = 2 * LAYERS
            assignment = [layer * stages // count for layer in range(count)]
            poptorch.set_pipeline_stage_assignment(self.layers, assignment)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss, a scalar."""
        return nn.functional.mse_loss(self.layers(x), y)


def contender(
    width: int, accumulation: int, stages: int, threads: int, data: list[torch.Tensor]
) -> tuple[Callable[[], object], nn.Module]:
    """Return a training step of one update, and its model.

    Args:
        width: Features of each layer.
        accumulation: Micro-batches of an update (count).
        stages: Stages of the pipeline; 1 for none.
        threads: The most threads that run stages; 0 for as many as PyTorch has.
        data: What the model is called with.
    """
    options = poptorch.Options().showCompilationProgressBar(False).autoRoundNumIPUs(True)
    options.Training.gradientAccumulation(accumulation)
    model = Layers(width, stages)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, options, optimizer)
    os.environ["POPSIM_STAGE_THREADS"] = str(threads)
    try:
        training.compile(*data)
    finally:
        del os.environ["POPSIM_STAGE_THREADS"]
    return functools.partial(training, *data), model


def main() -> None:
    """Print the table."""
    arguments = make_parser(__doc__, rounds=31).parse_args()
    print(describe_machine())
    table = Table(
        "Time of an update, milliseconds",
        [
            "layers, batch, micro-batches",
            "no stages",
            "stages, one thread",
            "stages, threads",
            "no stages / threads",
            "one thread / threads",
        ],
        "Targets: no stages / threads 1.5 for the small layers, 0.95 for the large ones.",
    )
    for width, batch, accumulation, stages in CASES:
        torch.manual_seed(1)
        data = [torch.randn(batch * accumulation, width) for _ in range(2)]
        made = {
            "team": contender(width, accumulation, 1, 0, data),
            "one": contender(width, accumulation, stages, 1, data),
            "lanes": contender(width, accumulation, stages, 0, data),
        }
        losses = [call() for call, _ in made.values()]
        for loss in losses[1:]:
            torch.testing.assert_close(loss, losses[0], rtol=0, atol=0)
        times = medians({name: call for name, (call, _) in made.items()}, arguments.rounds)
        team, one, lanes = (1e3 * times[name] for name in made)
        name = f"{LAYERS} x {width}, {batch}, {accumulation}"
        table.row(name, team, one, lanes, team / lanes, one / lanes)


if __name__ == "__main__":
    main()
