"""What is known about a tensor of a program."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["TensorInfo"]


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a program.

    Attributes:
        name: The name, which ``Options.anchorTensor`` takes.
        shape: The shape of one micro-batch; None for a tensor that is computed only if it is asked
            for.
        dtype: The dtype on the device; None if ``shape`` is None.
        kind: What the tensor is: ``input``, ``weight``, ``buffer``, ``activation``, ``gradient``,
            ``updated weight``, ``updated buffer``, ``optimizer state``, ``hyper-parameter``,
            ``recomputed`` (an activation that the backward pass computes again), ``stashed`` (an
            activation that a stage of a pipeline stores), or ``update`` (a part of the update).
        phase: The part of a run that computes it: ``forward``, ``backward``, ``update`` (once for
            each weight update), or ``setup`` for what is there before: inputs, weights, states.
        module: The path of the modules that it belongs to, ``layer1.0``; empty for none. The
            gradient of a weight belongs to the module of the weight.
        stage: The pipeline stage that computes it; of a weight, the first stage that reads it.
        source: ``file:line`` of the user's code that computes it; empty if there is none.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    kind: str
    phase: str = "forward"
    module: str = ""
    stage: int = 0
    source: str = ""

    @property
    def bytes(self) -> int | None:
        """The memory of one value (bytes); None if ``shape`` is None."""
        if self.shape is None or self.dtype is None:
            return None
        return math.prod(self.shape) * self.dtype.itemsize
