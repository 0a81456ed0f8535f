"""How much faster is a pipeline of two stages here than with torch.distributed.pipelining?

Both train the same layers with the same micro-batches, one forward and one backward at a time
(1F1B). torch.distributed.pipelining has a process for each stage, which send activations over gloo;
here, threads of one process hand them over. Each process or stage has one thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import popsim_torch as poptorch
from benchmarks.common.processes import run_in_processes, seconds_together
from benchmarks.common.report import Table, describe_machine, make_parser
from benchmarks.pipelines import CASES, LAYERS, Layers

STAGES = 2


def ours(width: int, accumulation: int, data: list[torch.Tensor]) -> Callable[[], object]:
    """Return an update of this package, with two threads in the first process."""
    options = poptorch.Options().showCompilationProgressBar(False).autoRoundNumIPUs(True)
    options.Distributed.disable()
    options.Training.gradientAccumulation(accumulation)
    options.outputMode(poptorch.OutputMode.Final)
    model = Layers(width, STAGES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, options, optimizer)
    training.compile(*data)
    return lambda: training(*data)


def theirs(width: int, accumulation: int, data: list[torch.Tensor]) -> Callable[[], object]:
    """Return an update of torch.distributed.pipelining; each process calls it."""
    rank = dist.get_rank()
    layers = list(Layers(width, 1).layers)
    half = len(layers) // STAGES
    part = nn.Sequential(*layers[rank * half : (rank + 1) * half])
    stage = PipelineStage(part, rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, accumulation, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
    x, y = data

    def update() -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=[])
        optimizer.step()

    return update


def measure(rounds: int) -> None:
    """Print the table; every process calls this."""
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    table = None
    if is_first:
        print(describe_machine())
        table = Table(
            "Time of an update, milliseconds",
            ["layers, batch, micro-batches", "torch", "here", "torch / here"],
            "Target: torch / here 1.5.",
        )
    for width, batch, accumulation, _ in CASES:
        torch.manual_seed(1)
        data = [torch.randn(batch * accumulation, width) for _ in range(2)]
        torch.set_num_threads(1)
        rival = theirs(width, accumulation, data)
        rival()
        # The second process has no part in it, and waits at the next barrier.
        own = ours(width, accumulation, data) if is_first else lambda: None
        own()
        times: dict[str, list[float]] = {"torch": [], "here": []}
        for _ in range(rounds):
            torch.set_num_threads(1)
            times["torch"].append(seconds_together(rival))
            torch.set_num_threads(STAGES)
            times["here"].append(seconds_together(own))
        if table is not None:
            found = {kind: 1e3 * median(each) for kind, each in times.items()}
            name = f"{LAYERS} x {width}, {batch}, {accumulation}"
            table.row(name, found["torch"], found["here"], found["torch"] / found["here"])
    dist.destroy_process_group()


def main() -> None:
    """Print the table, from two processes."""
    arguments = make_parser(__doc__, rounds=21).parse_args()
    if "RANK" in os.environ:
        measure(arguments.rounds)
        return
    run_in_processes("torch_pipelining", STAGES, arguments.rounds)


if __name__ == "__main__":
    main()
