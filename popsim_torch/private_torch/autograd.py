"""Autograd's nodes: their order, and the one that is at work.

Why: ``torch.autograd.graph.Node`` has its name and its next nodes, but not the order in which the
operations of forward ran. That order determines the order in which gradients are added. There is no
public way to ask whether an operator is called by PyTorch's own code for a gradient.
``torch.autograd.functional.jacobian`` cannot be told to compute in reverse mode what a program asks
for in forward mode; its function for forward mode is here in the form for ``unittest.mock``.

Checked: 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

__all__ = ["JACOBIAN_IN_FORWARD_MODE", "is_in_own_gradient", "sequence_number"]

JACOBIAN_IN_FORWARD_MODE = (torch.autograd.functional, "_jacfwd")


def is_in_own_gradient() -> bool:
    """Return whether a gradient of one of PyTorch's own operators is being computed."""
    node: Any = torch._C._current_autograd_node()
    return node is not None and not isinstance(node, BackwardCFunction)


def sequence_number(node: Any) -> int:
    """Return the number of a node's forward operation, counted on each thread."""
    return int(node._sequence_nr())
