"""The gradient that each use of a tensor contributes, if a tensor has several uses."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from popsim_torch.private_torch.autograd import sequence_number

__all__ = ["watch_uses"]

NoteUse = Callable[[int, int, torch.Tensor], None]


def watch_uses(root: Any, note: NoteUse) -> None:
    """Report the gradient that each use of a tensor contributes, if it has several uses.

    Args:
        root: Autograd's node of the tensor at which a backward pass starts.
        note: Called with the index of an operation among all operations, the index of an operand,
            and the gradient that the operation adds to the operand's gradient.
    """
    operations = sorted(_ancestors(root), key=sequence_number)
    uses = Counter(edge for node in operations for edge in node.next_functions)
    for position, node in enumerate(operations):
        shared = [
            operand
            for operand, edge in enumerate(node.next_functions)
            if edge[0] is not None and uses[edge] > 1
        ]
        if shared:
            node.register_hook(functools.partial(_note_uses, note, position, shared))


def _note_uses(
    note: NoteUse,
    position: int,
    operands: Sequence[int],
    gradients: Sequence[torch.Tensor | None],
    _of_results: object,
) -> None:
    for operand in operands:
        gradient = gradients[operand]
        if gradient is not None:
            note(position, operand, gradient)


def _ancestors(root: Any) -> list[Any]:
    """Return autograd's nodes from ``root`` to the parameters, without the parameters."""
    found: dict[Any, None] = {}
    todo = [root]
    while todo:
        node = todo.pop()
        if node is not None and node not in found and not hasattr(node, "variable"):
            found[node] = None
            todo.extend(following for following, _ in node.next_functions)
    return list(found)
