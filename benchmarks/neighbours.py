"""What does a busy neighbour cost a training step?

Another process computes without a pause on one core. The step then has the time of the other cores,
and a share of that one. With as many threads as cores it should never take longer than with one
thread: a thread that has no core must not make the others wait.

Means of turns of some tenths of a second are compared, in which the system divides the core many
times. Turns with and without the neighbour alternate. The script needs Linux.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

import popsim_torch as poptorch
from benchmarks.common.report import Table, describe_machine, make_parser

LAYERS = 16
# Features of each layer, samples of a batch.
CASES = ((64, 16), (256, 64), (1024, 128))
ITERATIONS = 4
BUSY = "import os\nos.sched_setaffinity(0, {%d})\nwhile True: pass"


@contextmanager
def neighbour(core: int) -> Iterator[None]:
    """Keep a core busy meanwhile."""
    process = subprocess.Popen([sys.executable, "-c", BUSY % core])
    try:
        time.sleep(0.2)  # until it has begun
        yield
    finally:
        process.kill()
        process.wait()


def contender(width: int, batch: int) -> Callable[[], object]:
    """Return some training steps of a perceptron.

    Args:
        width: Features of each layer.
        batch: Samples of a step.
    """
    torch.manual_seed(0)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers)
    options = poptorch.Options().showCompilationProgressBar(False)
    options.deviceIterations(ITERATIONS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(self.model(x), y)

    training = poptorch.trainingModel(WithLoss(), options, optimizer)
    x, y = torch.randn(2, ITERATIONS * batch, width)
    training(x, y)
    return lambda: training(x, y)


def turn(call: Callable[[], object], threads: int, seconds: float) -> float:
    """Return the mean time of a step, in milliseconds, over a number of seconds."""
    torch.set_num_threads(threads)
    call()
    start = time.perf_counter()
    count = 0
    while (passed := time.perf_counter() - start) < seconds:
        call()
        count += 1
    return 1e3 * passed / (count * ITERATIONS)


def main() -> None:
    """Print the table."""
    parser = make_parser(__doc__, rounds=9)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a turn (default: 0.3)")
    arguments = parser.parse_args()
    threads = torch.get_num_threads()
    core = max(os.sched_getaffinity(0))
    print(describe_machine())
    table = Table(
        "Time of a training step, milliseconds",
        [
            "layers, batch",
            "neighbour",
            "one thread, best",
            "median",
            f"{threads} threads, best",
            "median",
            "ratio, best",
            "median",
        ],
        "A ratio compares turns one after the other: the time with all threads, divided by that "
        "with one. Targets: below 1 alone, at most 1.15 beside a neighbour.",
    )
    for width, batch in CASES:
        call = contender(width, batch)
        turns: dict[str, list[tuple[float, float]]] = {"none": [], f"core {core}": []}
        for _ in range(arguments.rounds):
            alone = [turn(call, n, arguments.seconds) for n in (1, threads)]
            turns["none"].append((alone[0], alone[1]))
            with neighbour(core):
                beside = [turn(call, n, arguments.seconds) for n in (1, threads)]
            turns[f"core {core}"].append((beside[0], beside[1]))
        for name, pairs in turns.items():
            ones, alls = zip(*pairs, strict=True)
            ratios = [all_threads / one for one, all_threads in pairs]
            figures = [f(times) for times in (ones, alls, ratios) for f in (min, statistics.median)]
            table.row(f"{LAYERS} x {width}, {batch}", name, *figures)


if __name__ == "__main__":
    main()
