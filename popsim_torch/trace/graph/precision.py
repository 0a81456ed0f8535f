"""The precision of float32 products that the settings of PyTorch ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["FloatPrecision"]

_REDUCED = ("tf32", "bf16")


@dataclass(frozen=True, slots=True)
class FloatPrecision:
    """How many bits of float32 operands products need.

    Each field is ``"tf32"``, ``"bf16"``, or None for all bits.

    Attributes:
        matmul: Matrix products, and recurrent layers that PyTorch computes as matrix products.
        convolution: Convolutions.
        lstm: LSTMs.
    """

    matmul: str | None = None
    convolution: str | None = None
    lstm: str | None = None

    @classmethod
    def now(cls) -> FloatPrecision:
        """Return the present settings of PyTorch for CPUs; with oneDNN off they have no effect."""
        backend: Any = torch.backends.mkldnn
        if not backend.enabled:
            return cls()
        return cls(_needed(backend.matmul), _needed(backend.conv), _needed(backend.rnn))


def _needed(group: Any) -> str | None:
    precision: str = group.fp32_precision
    return precision if precision in _REDUCED else None
