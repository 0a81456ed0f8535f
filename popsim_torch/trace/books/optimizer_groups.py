"""Reads the groups of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["parameters_of", "values_of"]


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters that an optimizer trains."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                yield parameter


def values_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the values of an optimizer's groups, without their parameters."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
