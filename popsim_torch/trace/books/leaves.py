"""The leaves of autograd's graph."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["leaves_of"]


def leaves_of(loss: torch.Tensor, beside: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Return the leaves with a gradient that a loss depends on.

    Args:
        loss: The loss.
        beside: A tensor with a gradient; leaves count only if the loss depends on them in another
            way than through this tensor. None if all leaves count.
    """
    if loss.is_leaf:
        return [loss]
    leaves: dict[int, torch.Tensor] = {}
    seen: set[Any] = set() if beside is None else {beside.grad_fn}
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
