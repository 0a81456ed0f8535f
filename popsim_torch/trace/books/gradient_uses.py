"""What each use of a tensor adds to its gradient, where there are several."""

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
    """Tell what each use of a tensor adds to its gradient, where there are several.

    Args:
        root: Autograd's node of the tensor that a backward pass starts at.
        note: Called with the position of an operation among all of them, the position of an
            operand, and what the operation adds to the operand's gradient.
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
    """Return autograd's nodes on the way from ``root`` to the parameters, these left out."""
    found: dict[Any, None] = {}
    todo = [root]
    while todo:
        node = todo.pop()
        if node is not None and node not in found and not hasattr(node, "variable"):
            found[node] = None
            todo.extend(following for following, _ in node.next_functions)
    return list(found)
