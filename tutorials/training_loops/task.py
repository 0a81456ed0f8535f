"""The task of these programs: a small regression with endless data."""

from collections.abc import Iterator

import torch
from torch import nn

BATCH_SIZE = 16


def make_model() -> nn.Module:
    """Return a network with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


class Batches:
    """Endless batches of random points and a smooth function of them, from a seed."""

    def __init__(self, seed: int = 0):
        self.seed = seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            x = torch.rand(BATCH_SIZE, 8, generator=generator)
            yield x, torch.sin(x.sum(1, keepdim=True))
