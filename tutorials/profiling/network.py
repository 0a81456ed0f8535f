"""The network of this tutorial, its digits, and a training loop."""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

import popsim_torch as poptorch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import count
from common.batches import Batches, load_mnist
from common.data import add_data_arguments

LEARNING_RATE = 0.2


class Classifier(nn.Module):
    """Three linear layers; forward returns the loss.

    Args:
        is_pipelined: Whether the layers are divided into two stages, on two IPUs.
    """

    def __init__(self, is_pipelined: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(784, 256)
        self.second = nn.Linear(256, 128)
        self.classes = nn.Linear(128, 10)
        if is_pipelined:
            poptorch.BeginBlock(self.first, "first", ipu_id=0)
            poptorch.BeginBlock(self.second, "second", ipu_id=1)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(images.flatten(1)))
        x = torch.relu(self.second(x))
        return nn.functional.cross_entropy(self.classes(x), labels)


def wrap(options: poptorch.Options, is_pipelined: bool = False) -> poptorch.PoplarExecutor:
    """Return an executor that trains the network; the same weights each time."""
    model = Classifier(is_pipelined)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return poptorch.trainingModel(model, options, optimizer)


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the flags of all programs."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--micro-batch-size", type=count, default=16, help="samples (default: %(default)s)"
    )
    add_data_arguments(parser)
    return parser


def load_digits(arguments: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images, (N, 28, 28) with values from 0 to 1, and their digits, int64."""
    images, labels = load_mnist(arguments)
    return images, labels.long()


def train(
    executor: poptorch.PoplarExecutor,
    digits: tuple[torch.Tensor, torch.Tensor],
    calls: int,
    samples: int,
) -> torch.Tensor:
    """Train for some calls; mark what Python does for a trace of this computer.

    Args:
        executor: What ``wrap`` returns.
        digits: All images and labels.
        calls: The number of calls.
        samples: The number of samples in a call.

    Returns:
        The mean loss of each call.
    """
    channel = poptorch.profiling.Channel("training")
    batches = iter(Batches(*digits, samples))
    losses = []
    for _ in range(calls):
        with channel.tracepoint("batch"):
            images, labels = next(batches)
        with channel.tracepoint("call"):
            losses.append(executor(images, labels).mean())
    return torch.stack(losses)
