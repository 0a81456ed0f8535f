"""How much faster do two processes train than one, and than DistributedDataParallel?

All contenders train the same model with the same batches, and each process has one thread. One
process updates the weights from two micro-batches; two processes take one micro-batch each, and add
up their gradients. DistributedDataParallel is eager PyTorch in two processes, over gloo as well.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import popsim_torch as poptorch
from benchmarks.common.processes import run_in_processes, seconds_together
from benchmarks.common.report import Table, describe_machine, make_parser

PROCESSES = 2
# Name, widths of the layers, samples of a micro-batch, updates of a turn.
CASES = (
    ("784-320-100-10", (784, 320, 100, 10), 64, 40),
    ("8 x 512", (512,) * 9, 128, 8),
    ("4 x 1024", (1024,) * 5, 512, 3),
)


class Layers(nn.Module):
    """Linear layers with ReLU, and a loss."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        pairs = itertools.pairwise(widths)
        parts = [(nn.Linear(a, b), nn.ReLU()) for a, b in pairs]
        self.layers = nn.Sequential(*(layer for part in parts for layer in part))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss, a scalar."""
        return nn.functional.mse_loss(self.layers(x), y)


Contender = tuple[Callable[[], object], nn.Module]


def ours(widths: tuple[int, ...], data: list[torch.Tensor], *, together: bool) -> Contender:
    """Return an update of this package, and its model.

    Args:
        widths: The widths of the layers.
        data: The micro-batches of all processes, one after the other.
        together: Whether each process takes its own part; otherwise one takes everything.
    """
    options = poptorch.Options().showCompilationProgressBar(False)
    if not together:
        options.Distributed.disable()
        options.Training.gradientAccumulation(PROCESSES)
    model = Layers(widths)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, options, optimizer)
    own = [x.chunk(PROCESSES)[dist.get_rank()] for x in data] if together else data
    training.compile(*own)
    return lambda: training(*own), model


def ddp(widths: tuple[int, ...], data: list[torch.Tensor]) -> Contender:
    """Return an update of eager PyTorch in all processes, and its model."""
    model = Layers(widths)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    own = [x.chunk(PROCESSES)[dist.get_rank()] for x in data]

    def update() -> None:
        optimizer.zero_grad()
        parallel(*own).backward()
        optimizer.step()

    return update, model


def measure(rounds: int) -> None:
    """Print the table; every process calls this."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    table = None
    if is_first:
        print(describe_machine())
        table = Table(
            "Time of an update, milliseconds",
            [
                *("layers, micro-batch", "MB of gradients", "one process", "two", "DDP"),
                *("one / two", "DDP / two"),
            ],
            "Targets: one / two 1.5 from 10 ms of computing per MB on, DDP / two 1.3.",
        )
    for name, widths, batch, updates in CASES:
        torch.manual_seed(1)
        data = [torch.randn(batch * PROCESSES, width) for width in (widths[0], widths[-1])]
        made = {
            "one": ours(widths, data, together=False),
            "two": ours(widths, data, together=True),
            "ddp": ddp(widths, data),
        }
        for update, _ in made.values():
            update()
        first, *others = [dict(model.state_dict()) for _, model in made.values()]
        for other in others:
            torch.testing.assert_close(other, first)
        times: dict[str, list[float]] = {kind: [] for kind in made}
        for _ in range(rounds):
            for kind, (update, _) in made.items():
                # One process trains alone, and the other one waits at the next barrier.
                count = updates if is_first or kind != "one" else 0
                times[kind].append(seconds_together(update, count))
        if table is not None:
            one, two, rival = (1e3 * median(times[kind]) for kind in made)
            megabytes = sum(value.numel() * 4 for value in first.values()) / 1e6
            table.row(f"{name}, {batch}", megabytes, one, two, rival, one / two, rival / two)
    dist.destroy_process_group()


def main() -> None:
    """Print the table, from two processes."""
    arguments = make_parser(__doc__, rounds=21).parse_args()
    if "RANK" in os.environ:
        measure(arguments.rounds)
        return
    run_in_processes("processes", PROCESSES, arguments.rounds)


if __name__ == "__main__":
    main()
