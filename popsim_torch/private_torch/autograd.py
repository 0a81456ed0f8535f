"""The order of autograd's nodes: the order of the operations whose gradients they compute.

Why: ``torch.autograd.graph.Node`` has its name and its next nodes, but not the order in which the
operations of forward ran. That order determines the order in which gradients are added.

Checked: 2.13.
"""

from __future__ import annotations

from typing import Any

__all__ = ["sequence_number"]


def sequence_number(node: Any) -> int:
    """Return the number of a node's forward operation, counted on each thread."""
    return int(node._sequence_nr())
