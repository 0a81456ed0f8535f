"""Endless shuffled batches of digits for an infeed queue; all images are in memory."""

import argparse
from collections.abc import Iterator

import torch

from common.data import open_mnist


class Batches:
    """Batches of all examples in random order, one epoch after another.

    The examples at the end of an epoch that do not fill a batch are dropped, so all batches have
    the same shape. The same seed gives the same batches.

    Args:
        images: A tensor with one image for each index of the first axis, in any shape.
        labels: One label for each image.
        batch_size: Examples per batch (count).
        seed: Seed of the random order.
    """

    def __init__(
        self, images: torch.Tensor, labels: torch.Tensor, batch_size: int, seed: int = 0
    ) -> None:
        if len(images) < batch_size:
            raise ValueError(f"{len(images)} examples do not fill a batch of {batch_size}.")
        self.images = images
        self.labels = labels
        self.batch_size = batch_size
        self.seed = seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        num_used = len(self.images) // self.batch_size * self.batch_size
        while True:
            order = torch.randperm(len(self.images), generator=generator)[:num_used]
            for chosen in order.split(self.batch_size):
                yield self.images[chosen], self.labels[chosen]


def load_mnist(arguments: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the training images, (N, 28, 28) with values from 0 to 1, and their digits, int32.

    Args:
        arguments: The parsed arguments, with the options of ``add_data_arguments``.
    """
    dataset = open_mnist(arguments.data_root, arguments.download)
    return dataset.data.float() / 255, dataset.targets.to(torch.int32)
