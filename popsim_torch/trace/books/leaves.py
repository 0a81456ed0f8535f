"""The leaves of autograd's graph."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["leaves_of"]


def leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the leaves with a gradient that a loss depends on."""
    if loss.is_leaf:
        return [loss]
    leaves: dict[int, torch.Tensor] = {}
    seen: set[Any] = set()
    todo: list[Any] = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        todo.extend(following for following, _ in node.next_functions)
    return list(leaves.values())
