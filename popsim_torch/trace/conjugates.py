"""Conjugates of Python's numbers in a graph.

The gradient of ``z * 1j`` is a product with the conjugate of ``1j``. PyTorch computes that from a
tensor of complex128 without a dimension, which a trace records as the number.
"""

from __future__ import annotations

import torch.fx

__all__ = ["conjugate_numbers"]

_OPERATORS = ("aten._conj.default", "aten.conj_physical.default")


def conjugate_numbers(graph: torch.fx.Graph) -> None:
    """Replace the conjugates of numbers in a graph by numbers.

    Args:
        graph: The graph; it is changed.
    """
    for node in list(graph.nodes):
        if str(node.target) not in _OPERATORS or isinstance(node.args[0], torch.fx.Node):
            continue
        value = complex(node.args[0]).conjugate()
        for user in list(node.users):
            _put(user, node, value)
        graph.erase_node(node)


def _put(user: torch.fx.Node, node: torch.fx.Node, value: complex) -> None:
    """Replace a node among the arguments of another one."""

    def chosen(one: torch.fx.Node) -> torch.fx.node.Argument:
        return value if one is node else one

    user.args = torch.fx.node.map_arg(user.args, chosen)
    user.kwargs = torch.fx.node.map_arg(user.kwargs, chosen)
