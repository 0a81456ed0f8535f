"""Train a small network in loops on the device, with queues for batches and losses."""

import time
from collections.abc import Callable, Iterable

import torch
from network import count, load_batches, loss_of, make_network, make_parser, print_losses

import popsim_torch as poptorch


def make_training(
    batches: Iterable, steps_per_execution: int, learning_rate: float
) -> tuple[Callable[[], None], poptorch.OutfeedQueue]:
    """Return a function that trains for some steps, and the queue for the loss of each step."""
    network = make_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=learning_rate)
    infeed = poptorch.InfeedQueue(batches)
    outfeed = poptorch.OutfeedQueue()

    def step(images, labels):
        loss = loss_of(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        outfeed.enqueue(loss)

    @poptorch.function
    def train():
        poptorch.repeat(steps_per_execution, step, infeed=infeed)

    return train, outfeed


def main() -> None:
    parser = make_parser(__doc__, steps=10_000)
    parser.add_argument(
        "--steps-per-execution",
        type=count,
        default=10,
        help="batches for each call of the device (default: %(default)s)",
    )
    arguments = parser.parse_args()
    steps, steps_per_execution = arguments.steps, arguments.steps_per_execution
    if steps % steps_per_execution:
        below = steps - steps % steps_per_execution
        nearest = f"{below} or {below + steps_per_execution}" if below else steps_per_execution
        parser.error(
            f"--steps ({steps}) must be a multiple of --steps-per-execution "
            f"({steps_per_execution}): use {nearest}."
        )
    batches = load_batches(arguments)
    train, outfeed = make_training(batches, steps_per_execution, arguments.learning_rate)

    start_time = time.time()
    for _ in range(0, steps, steps_per_execution):
        train()
    losses = outfeed.dequeue()
    print("Time taken using infeed/outfeed queues:", time.time() - start_time, "seconds")
    print_losses(losses)


if __name__ == "__main__":
    main()
