"""Recording: the node of a tensor in a ``torch.fx`` graph, and the recorder itself.

Why: ``torch.fx.symbolic_trace`` sees calls of Python functions, but no operators and no backward.
``make_fx`` and its mode see both. They are experimental, so only this file imports them. A graph's
``nodes`` have a last one only if there are any.

Checked: 2.13.
"""

import functools

import torch
import torch.fx
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    set_proxy_slot,
    track_tensor_tree,
)

__all__ = [
    "disable_proxy_modes_tracing",
    "get_proxy_mode",
    "get_proxy_slot",
    "last_node",
    "record_graph",
    "share_node",
    "track_tensor_tree",
]

# Records a function as a graph of operators; disables the mode that would store PyTorch's function
# in the metadata of each node, because nothing reads it.
record_graph = functools.partial(make_fx, tracing_mode="real", _disable_torch_fn_metadata_mode=True)


def share_node(target: torch.Tensor, source: torch.Tensor) -> None:
    """Make the node of another tensor the node of a recorded tensor."""
    mode = get_proxy_mode()
    if mode is not None:
        set_proxy_slot(target, mode.tracer, get_proxy_slot(source, mode.tracer))


def last_node(graph: torch.fx.Graph) -> torch.fx.Node:
    """Return the last node of a graph; for an empty graph the node after which nodes are added."""
    return graph._root.prev
