"""Optimizers that pass gradients to queues: the information for the weight update."""

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
    """The interface of a queue for gradients in a compilation."""

    note: str
    """A description of the values; the compilation sets it to how they were accumulated."""
    queue: Any
    """The outfeed queue that gets the elements."""

    def take_gradients(self, offers: Mapping[str, torch.Tensor]) -> tuple[Any, list[str]] | None:
        """Return the structure of the queue's elements and the keys that they have.

        Args:
            offers: For each key a tensor with the gradient's shape and dtype, in the order of
                elements.

        Returns:
            None if no key is taken.
        """


@dataclass(frozen=True)
class GradientCapture:
    """Gradients that a program should enqueue.

    Attributes:
        queue: The queue for the gradients.
        mode: Which gradients to enqueue.
        names: The names of parameters in keys, by ``id``; empty for the program's names.
        only: The ``id`` of each parameter whose gradient is enqueued; None for all updated
            parameters.
    """

    queue: GradientQueue
    mode: OutfeedOptimizerMode
    names: Mapping[int, str]
    only: frozenset[int] | None = None


@dataclass(frozen=True)
class GradientEnqueue:
    """An element of gradients that the weight update enqueues.

    Attributes:
        queue: The number of the program's queue.
        mode: Which gradients are enqueued.
        parameters: The parameters, in the order of the element's tensors.
        dtypes: The dtypes of the element's tensors.
        micro_batches: The number of micro-batches per weight update, in all replicas.
        divisor: The divisor of accumulated gradients: 1 for their sum.
    """

    queue: int
    mode: OutfeedOptimizerMode
    parameters: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    micro_batches: int
    divisor: float

    @property
    def accumulated(self) -> bool:
        """Whether an element combines the gradients of several micro-batches."""
        return self.mode == OutfeedOptimizerMode.BEFORE_APPLY and self.micro_batches > 1


class ObservedOptimizer(torch.optim.Optimizer):
    """An optimizer around another one, which does the updates."""

    wrapped: torch.optim.Optimizer
    """The optimizer that does the updates."""

    def capture(self) -> GradientCapture:
        """Return the description of the gradients to capture, and of their queue."""
        raise NotImplementedError


def unwrapped(
    optimizer: torch.optim.Optimizer,
) -> tuple[torch.optim.Optimizer, tuple[GradientCapture, ...]]:
    """Return the optimizer that does the updates, and the captures of its wrappers."""
    captures = []
    while isinstance(optimizer, ObservedOptimizer):
        captures.append(optimizer.capture())
        optimizer = optimizer.wrapped
    # All wrappers around an optimizer are made for the same model.
    names = next((capture.names for capture in captures if capture.names), {})
    return optimizer, tuple(
        capture if capture.names else replace(capture, names=names) for capture in captures
    )
