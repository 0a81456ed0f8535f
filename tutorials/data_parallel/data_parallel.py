"""Train a network on digits with replicas and processes, and show that all train alike.

`python data_parallel.py` trains with 1, 2 and 4 replicas; `torchrun --nproc-per-node 2
data_parallel.py --replicas 2` trains with two processes of two replicas each.
"""

import argparse
import hashlib
import itertools
import sys
import time
from pathlib import Path

import torch
from network import Classifier

import popsim_torch as poptorch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import count, positive
from common.batches import Batches, load_mnist
from common.data import add_data_arguments


def micro_batches(arguments: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the micro-batches of all updates, in the order in which one replica takes them."""
    images, labels = load_mnist(arguments)
    batches = Batches(images, labels.long(), arguments.micro_batch_size, arguments.seed)
    chosen = itertools.islice(batches, arguments.updates * arguments.micro_batches)
    images, labels = map(torch.stack, zip(*chosen, strict=True))
    return images, labels


def share(values: torch.Tensor, replicas: int, process: int, processes: int) -> torch.Tensor:
    """Return the rows that the replicas of a process take.

    Args:
        values: All micro-batches, along the first axis.
        replicas: The replicas of each process.
        process: The number of this process.
        processes: The number of processes.
    """
    divided = values.unflatten(0, (-1, processes, replicas))
    return divided[:, process].flatten(0, 2)


def train(
    arguments: argparse.Namespace, replicas: int, images: torch.Tensor, labels: torch.Tensor
) -> str:
    """Train, and return a line about it."""
    options = poptorch.Options().randomSeed(arguments.seed)
    processes = options.Distributed.numProcesses
    copies = replicas * processes
    if arguments.micro_batches % copies:
        raise SystemExit(
            f"{replicas} replicas in {processes} processes cannot share {arguments.micro_batches} "
            "micro-batches: pass --micro-batches with a multiple."
        )
    accumulation = arguments.micro_batches // copies
    options.replicationFactor(replicas).deviceIterations(arguments.updates)
    options.outputMode(poptorch.OutputMode.All).autoRoundNumIPUs(True)
    options.Training.gradientAccumulation(accumulation)

    model = Classifier(arguments.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.learning_rate, momentum=0.9)
    training = poptorch.trainingModel(model, options, optimizer)
    own = [
        share(one, replicas, options.Distributed.processId, processes) for one in (images, labels)
    ]
    training.compile(*own)
    start = time.perf_counter()
    training(*own)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        loss = model.eval()(images.flatten(0, 1), labels.flatten(0, 1)).item()
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    exchanges = training.traffic().exchanges
    training.destroy()
    return (
        f"{processes:9} {replicas:8} {accumulation:12} {loss:9.5f} {exchanges:9} "
        f"{labels.numel() / seconds:11,.0f} {digest.hexdigest()[:8]}"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a network with replicas and processes.")
    parser.add_argument("--replicas", type=count, nargs="+", default=[1, 2, 4], help="in a process")
    parser.add_argument("--micro-batches", type=count, default=8, help="for a weight update")
    parser.add_argument("--micro-batch-size", type=count, default=32)
    parser.add_argument("--updates", type=count, default=20)
    parser.add_argument("--learning-rate", type=positive, default=0.1)
    parser.add_argument("--seed", type=int, default=0, help="for weights, shuffling and dropout")
    add_data_arguments(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    images, labels = micro_batches(arguments)
    lines = [train(arguments, replicas, images, labels) for replicas in arguments.replicas]
    if poptorch.Options().Distributed.processId == 0:
        print("processes replicas accumulation      loss exchanges   samples/s weights")
        print("\n".join(lines))


if __name__ == "__main__":
    main()
