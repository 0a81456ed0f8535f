"""How much faster are two replicas than one?

The same layers train with the same micro-batches in three ways: one replica on one thread, one
replica whose ops share two threads, and two replicas with a thread each and half of the
micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

import popsim_torch as poptorch
from benchmarks.common.clock import medians
from benchmarks.common.report import Table, describe_machine, make_parser
from benchmarks.pipelines import LAYERS, Layers

# Features of each layer, samples of a micro-batch, micro-batches of an update.
CASES = ((96, 8, 32), (256, 16, 32), (768, 64, 16))
REPLICAS = 2


def contender(
    width: int, accumulation: int, replicas: int, threads: int, data: list[torch.Tensor]
) -> Callable[[], object]:
    """Return a training step of one update.

    Args:
        width: Features of each layer.
        accumulation: Micro-batches of an update, of all replicas together (count).
        replicas: Replicas (count).
        threads: The number of threads.
        data: What the model is called with.
    """
    options = poptorch.Options().showCompilationProgressBar(False)
    options.replicationFactor(replicas).outputMode(poptorch.OutputMode.Sum)
    options.Training.gradientAccumulation(accumulation // replicas)
    model = Layers(width, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, options, optimizer)
    training.compile(*data)

    def step() -> torch.Tensor:
        torch.set_num_threads(threads)
        return training(*data).sum()

    return step


def main() -> None:
    """Print the table."""
    arguments = make_parser(__doc__, rounds=31).parse_args()
    print(describe_machine())
    table = Table(
        "Time of an update, milliseconds",
        [
            "layers, batch, micro-batches",
            "one, one thread",
            "one, two threads",
            "two",
            "one thread / two",
            "two threads / two",
        ],
        "Targets: one thread / two 1.7 for the small layers, 1.5 for the large ones.",
    )
    for width, batch, accumulation in CASES:
        torch.manual_seed(1)
        data = [torch.randn(batch * accumulation, width) for _ in range(2)]
        make = functools.partial(contender, width, accumulation)
        made = {
            "one": make(1, 1, data),
            "team": make(1, REPLICAS, data),
            "two": make(REPLICAS, REPLICAS, data),
        }
        losses = [call() for call in made.values()]
        for loss in losses[1:]:
            torch.testing.assert_close(loss, losses[0])
        times = medians(made, arguments.rounds)
        one, team, two = (1e3 * times[name] for name in made)
        name = f"{LAYERS} x {width}, {batch}, {accumulation}"
        table.row(name, one, team, two, one / two, team / two)


if __name__ == "__main__":
    main()
