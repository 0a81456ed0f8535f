"""The shared parts of the programs: flags, digits, the network and its loss."""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import count, positive
from common.batches import Batches, load_mnist
from common.data import add_data_arguments


def make_network() -> nn.Module:
    """Return the network 784-128-10 with a final softmax, with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10), nn.Softmax(dim=1)
    )


def loss_of(probabilities: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of probabilities that a softmax has computed."""
    # A probability that is rounded to zero has no logarithm, so limit it.
    return functional.nll_loss(probabilities.clamp(min=1e-7).log(), labels)


def make_parser(description: str, steps: int) -> argparse.ArgumentParser:
    """Return a parser of the flags of all programs.

    Args:
        description: The description of the program.
        steps: The default of ``--steps`` (batches).
    """
    parser = argparse.ArgumentParser(description=description)
    flag = parser.add_argument
    flag("--steps", type=count, default=steps, help="batches (default: %(default)s)")
    flag("--batch-size", type=count, default=32, help="(default: %(default)s)")
    flag("--learning-rate", type=positive, default=0.01, help="(default: %(default)s)")
    add_data_arguments(parser)
    return parser


def load_batches(arguments: argparse.Namespace) -> Batches:
    """Return endless batches of images and their digits, in a new random order in every epoch."""
    images, labels = load_mnist(arguments)
    return Batches(images, labels.long(), arguments.batch_size)


def print_losses(losses: torch.Tensor) -> None:
    """Print the mean loss of the first tenth and of the last tenth of the batches."""
    tenth = max(1, len(losses) // 10)
    first, last = losses[:tenth].mean().item(), losses[-tenth:].mean().item()
    print(f"Mean loss of {len(losses)} batches: {first:.4f} at first, {last:.4f} at last")
