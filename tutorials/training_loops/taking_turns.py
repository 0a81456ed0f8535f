"""Train a generator and a discriminator in one iteration of a loop, with plain PyTorch code."""

import argparse
import copy
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import popsim_torch as poptorch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import count

BATCH_SIZE = 64


class Gan:
    """A generator of points, a discriminator of generated and real points, and their optimizers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
        self.make_optimizers()

    def make_optimizers(self) -> None:
        betas = (0.5, 0.999)
        self.of_g = torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=betas)
        self.of_d = torch.optim.Adam(self.discriminator.parameters(), lr=2e-3, betas=betas)

    def twin(self) -> "Gan":
        """Return a copy with the same weights."""
        other = copy.copy(self)
        other.generator = copy.deepcopy(self.generator)
        other.discriminator = copy.deepcopy(self.discriminator)
        other.make_optimizers()
        return other

    def iteration(
        self, real: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Train both on one batch; return their losses."""
        # Train the discriminator on real and on generated points: both gradients add up.
        self.of_d.zero_grad()
        loss_real = functional.softplus(-self.discriminator(real)).mean()
        loss_real.backward()
        fake = self.generator(noise)
        loss_fake = functional.softplus(self.discriminator(fake.detach())).mean()
        loss_fake.backward()
        self.of_d.step()
        # Train the generator with the updated discriminator.
        self.of_g.zero_grad()
        loss_g = functional.softplus(-self.discriminator(fake)).mean()
        loss_g.backward()  # the next zero_grad() removes its gradients of the discriminator
        self.of_g.step()
        return loss_real + loss_fake, loss_g


class Points:
    """Endless points on a circle of radius 2, and noise, from a seed."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        while True:
            angle = 2 * math.pi * torch.rand(BATCH_SIZE, generator=generator)
            noise = torch.randn(BATCH_SIZE, 4, generator=generator)
            yield 2 * torch.stack((angle.cos(), angle.sin()), 1), noise


def train_on_device(gan: Gan, iterations: int) -> torch.Tensor:
    """Return the losses of all iterations, shape ``(iterations, 2)``."""
    points, losses = poptorch.InfeedQueue(Points()), poptorch.OutfeedQueue()

    def body(real, noise):
        losses.enqueue(torch.stack(gan.iteration(real, noise)))

    @poptorch.function
    def train():
        poptorch.repeat(iterations, body, infeed=points)

    train()
    points.deleter()
    return losses.dequeue()


def train_in_pytorch(gan: Gan, iterations: int) -> torch.Tensor:
    found = [
        torch.stack(gan.iteration(real, noise)).detach()
        for _, (real, noise) in zip(range(iterations), Points(), strict=False)
    ]
    return torch.stack(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=count, default=600, help="(default: %(default)s)")
    iterations = parser.parse_args().iterations
    gan = Gan()
    twin = gan.twin()
    losses = train_on_device(gan, iterations)
    for iteration in range(0, iterations, max(1, iterations // 4)):
        of_d, of_g = losses[iteration].tolist()
        print(
            f"iteration {iteration}: loss of the discriminator {of_d:.3f}, "
            f"of the generator {of_g:.3f}"
        )
    with torch.no_grad():
        made = gan.generator(torch.randn(1000, 4)).norm(dim=1)
    print(f"made points lie at a radius of {made.mean():.1f}")
    few = min(iterations, 20)
    difference = (losses[:few] - train_in_pytorch(twin, few)).abs().max().item()
    print(f"largest difference from PyTorch in the first {few} iterations: {difference:.1e}")


if __name__ == "__main__":
    main()
