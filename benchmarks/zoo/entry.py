"""What an entry of the zoo is, and what it needs to be trained the same way twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Batch = Mapping[str, torch.Tensor]
"""The arguments of one call, by the names that the model gives them."""


@dataclass(frozen=True)
class Entry:
    """A model and its data.

    Attributes:
        name: The name in tables and on the command line.
        library: Where the model comes from; a heading of the page.
        make: Makes the model; its output is a loss, or has one.
        make_batch: Draws the arguments of a call from a generator.
        data: What a batch is, in words.
        learning_rate: Of SGD.
        needs: Packages that must be there.
        steps: Steps of a trial.
    """

    name: str
    library: str
    make: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], Batch]
    data: str
    learning_rate: float = 0.01
    needs: tuple[str, ...] = ()
    steps: int = 10

    def model(self) -> nn.Module:
        """Return the model in training mode, the same each time, without random numbers."""
        torch.manual_seed(0)
        return without_randomness(self.make()).train()

    def batches(self, number: int) -> list[Batch]:
        """Return as many batches, the same each time."""
        generator = torch.Generator().manual_seed(1)
        return [self.make_batch(generator) for _ in range(number)]


def without_randomness(model: nn.Module) -> nn.Module:
    """Switch off what draws random numbers: contenders would draw different ones."""
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
        if isinstance(getattr(module, "p", None), float):  # dropout and stochastic depth
            module.p = 0.0
    return model


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss of a model's output."""
    if isinstance(output, torch.Tensor):
        return output
    return output["loss"] if isinstance(output, Mapping) else output[-1]
