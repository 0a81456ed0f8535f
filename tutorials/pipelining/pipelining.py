"""Train a network on digits over 1, 2 and 4 stages in all schedules, and show how they work."""

import argparse
import itertools
import sys
import time
from pathlib import Path

import torch
from networks import NETWORKS, make

import popsim_torch as poptorch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import count, positive
from common.batches import Batches, load_mnist
from common.data import add_data_arguments

ALL_SCHEDULES = [schedule.name for schedule in poptorch.PipelineSchedule]


def combined_batch(arguments: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images and labels of a call: all micro-batches of its weight updates."""
    images, labels = load_mnist(arguments)
    batches = Batches(images, labels.long(), arguments.micro_batch_size, arguments.seed)
    size = arguments.updates * arguments.gradient_accumulation
    chosen = itertools.islice(batches, size)
    images, labels = map(torch.cat, zip(*chosen, strict=True))
    return images, labels


def divide(num_layers: int, num_stages: int) -> list[int]:
    """Return the stage of each layer; all stages have about as many layers."""
    return [layer * num_stages // num_layers for layer in range(num_layers)]


def wrap(arguments: argparse.Namespace, num_stages: int, schedule: str) -> poptorch.PoplarExecutor:
    """Return an executor that trains the network in some stages."""
    model = make(arguments.network, arguments.seed)
    stages = divide(len(model.layers), num_stages)
    poptorch.set_pipeline_stage_assignment(model.layers, stages)
    options = poptorch.Options().deviceIterations(arguments.updates)
    options.pipelineSchedule(poptorch.PipelineSchedule[schedule])
    options.Training.gradientAccumulation(arguments.gradient_accumulation)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.learning_rate)
    return poptorch.trainingModel(model, options, optimizer)


def balance(executor: poptorch.PoplarExecutor, num_stages: int, *batch: torch.Tensor) -> list[int]:
    """Return stages that take about equally long, from the measured times of the layers."""
    profile = executor.profile(*batch)
    layers = executor.model.layers
    records = poptorch.balanced_pipeline_stages(layers, profile, num_stages, prefix="layers")
    poptorch.set_pipeline_stage_assignment(layers, records)
    return [record.stage for record in records]


def measure(executor: poptorch.PoplarExecutor, rounds: int, *batch: torch.Tensor) -> float:
    """Return the shortest time of a call, in seconds; the timeline of the last one is recorded."""
    executor(*batch)  # the first call touches all memory
    executor.record_timeline()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        executor(*batch)
        times.append(time.perf_counter() - start)
    return min(times)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=list(NETWORKS), default="mlp")
    parser.add_argument("--stages", type=count, nargs="+", default=[1, 2, 4])
    parser.add_argument("--schedules", choices=ALL_SCHEDULES, nargs="+", default=ALL_SCHEDULES)
    parser.add_argument("--micro-batch-size", type=count, default=64)
    parser.add_argument("--gradient-accumulation", type=count, default=16)
    parser.add_argument("--updates", type=count, default=2, help="weight updates in a call")
    parser.add_argument("--learning-rate", type=positive, default=0.1)
    parser.add_argument("--rounds", type=count, default=3, help="calls that are measured")
    parser.add_argument("--balance", action="store_true", help="choose the stages by their time")
    parser.add_argument("--seed", type=int, default=0, help="for weights and shuffling")
    parser.add_argument(
        "--output", type=Path, metavar="PNG", help="draw the last pipeline to this file"
    )
    add_data_arguments(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    batch = combined_batch(arguments)

    weights, lines = [], []
    for num_stages, schedule in itertools.product(arguments.stages, arguments.schedules):
        if num_stages == 1 and schedule != arguments.schedules[0]:
            continue  # one stage has nothing to overlap with
        executor = wrap(arguments, num_stages, schedule)
        if arguments.balance:
            balance(executor, num_stages, *batch)
        try:
            executor.compile(*batch)
        except poptorch.Error as error:
            raise SystemExit(str(error)) from error
        seconds = measure(executor, arguments.rounds, *batch)
        plan, timeline = executor.schedule(), executor.timeline()
        print(f"{plan}\n\n{executor.stages()}\n\n{timeline}\n")
        planned, measured = min(plan.use), sum(timeline.use) / num_stages
        lines.append(
            f"{num_stages:6} {plan.name:<12} {planned:8.0%} {measured:9.0%} "
            f"{len(batch[0]) / seconds:14,.0f}"
        )
        if arguments.output is not None:
            plan.plot(arguments.output)
        weights.append([value.clone() for value in executor.model.state_dict().values()])
        executor.destroy()

    print("stages schedule      planned  measured      samples/s")
    print("\n".join(lines))
    equal = all(
        torch.equal(one, other)
        for found in weights
        for one, other in zip(found, weights[0], strict=True)
    )
    print("The same weights in all of them, to the last bit:", equal)
    if arguments.output is not None:
        print(f"Saved plot to {arguments.output}")


if __name__ == "__main__":
    main()
