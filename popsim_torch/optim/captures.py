"""Optimizers that hand gradients to queues: what the weight update needs to know of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from popsim_torch.enums import OutfeedOptimizerMode

__all__ = [
    "GradientCapture",
    "GradientEnqueue",
    "GradientQueue",
    "ObservedOptimizer",
    "unwrapped",
]


class GradientQueue(Protocol):
    """A queue for gradients, as a compilation sees it."""

    note: str
    """What the values are; the compilation says how they were accumulated."""
    queue: Any
    """The outfeed queue after it."""

    def take_gradients(self, offers: Mapping[str, torch.Tensor]) -> tuple[Any, list[str]] | None:
        """Return the structure of the queue's elements and the keys that they have.

        Args:
            offers: A tensor of the gradient's shape and type by key, in the order of elements.

        Returns:
            None if no key is taken.
        """


@dataclass(frozen=True)
class GradientCapture:
    """Gradients that a program is to enqueue.

    Attributes:
        queue: Where they go.
        mode: Which ones.
        names: What keys call parameters, by ``id``; empty: as the program does.
        only: The ``id`` of each parameter whose gradient is meant; None: all that are updated.
    """

    queue: GradientQueue
    mode: OutfeedOptimizerMode
    names: Mapping[int, str]
    only: frozenset[int] | None = None


@dataclass(frozen=True)
class GradientEnqueue:
    """An element of gradients, as the weight update makes it.

    Attributes:
        queue: Number of the program's queue.
        mode: Which gradients.
        parameters: Whose, in the order of the element's tensors.
        dtypes: Element types of the element's tensors.
        micro_batches: Micro-batches of a weight update (count).
        divisor: What accumulated gradients are divided by: 1 for their sum.
    """

    queue: int
    mode: OutfeedOptimizerMode
    parameters: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    micro_batches: int
    divisor: float

    @property
    def accumulated(self) -> bool:
        """Whether gradients of several micro-batches are in an element."""
        return self.mode == OutfeedOptimizerMode.BEFORE_APPLY and self.micro_batches > 1


class ObservedOptimizer(torch.optim.Optimizer):
    """An optimizer around another one, which does the updates."""

    wrapped: torch.optim.Optimizer
    """The optimizer that does the updates."""

    def capture(self) -> GradientCapture:
        """Return which gradients go where."""
        raise NotImplementedError


def unwrapped(
    optimizer: torch.optim.Optimizer,
) -> tuple[torch.optim.Optimizer, tuple[GradientCapture, ...]]:
    """Return the optimizer that does the updates, and what those around it capture."""
    captures = []
    while isinstance(optimizer, ObservedOptimizer):
        captures.append(optimizer.capture())
        optimizer = optimizer.wrapped
    # One around another is made for the same model.
    names = next((capture.names for capture in captures if capture.names), {})
    return optimizer, tuple(
        capture if capture.names else replace(capture, names=names) for capture in captures
    )
