"""The nodes of autograd's graph, in the order of the operations whose gradients they are.

Why: ``torch.autograd.graph.Node`` offers its name and the nodes in front of it. In which order the
operations of forward ran, which decides the order in which gradients are added up, it does not.

Checked: 2.13.
"""

from __future__ import annotations

from typing import Any

__all__ = ["sequence_number"]


def sequence_number(node: Any) -> int:
    """Return the number of the operation that a node is the gradient of, counted on each thread."""
    return int(node._sequence_nr())
