"""Train the same network in a Python loop, with a call of the device for each batch."""

import time

import torch
from network import load_batches, loss_of, make_network, make_parser, print_losses
from torch import nn

import popsim_torch as poptorch


class WithLoss(nn.Module):
    """The network and its loss."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, images, labels):
        return loss_of(self.network(images), labels)


def make_training(learning_rate: float) -> poptorch.PoplarExecutor:
    """Return a model that trains with one batch in each call, and returns its loss."""
    network = make_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=learning_rate)
    return poptorch.trainingModel(WithLoss(network), optimizer=optimizer)


def main() -> None:
    arguments = make_parser(__doc__, steps=10_000).parse_args()
    train = make_training(arguments.learning_rate)
    batches = iter(load_batches(arguments))

    start_time = time.time()
    losses = []
    for _ in range(arguments.steps):
        images, labels = next(batches)
        losses.append(train(images, labels))
    result = torch.stack(losses)
    print("Time taken without infeed/outfeed queues:", time.time() - start_time, "seconds")
    print_losses(result)


if __name__ == "__main__":
    main()
