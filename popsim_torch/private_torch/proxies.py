"""Recording: the node of a tensor in a ``torch.fx`` graph, and the recorder itself.

Why: ``torch.fx.symbolic_trace`` sees calls of Python functions, but no operators and no backward.
``make_fx`` and its mode see both. They are experimental, so only this file imports them. A graph's
``nodes`` have a last one only if there are any.

Checked: 2.13.
"""

import functools
from typing import Any

import torch
import torch.fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import (
    _ProxyTensor,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    set_proxy_slot,
    track_tensor_tree,
)

__all__ = [
    "add_call",
    "constant_or_node",
    "current_tracer",
    "disable_proxy_modes_tracing",
    "get_proxy_mode",
    "get_proxy_slot",
    "last_node",
    "record_graph",
    "share_node",
    "track",
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


def current_tracer() -> Any:
    """Return the object that records operators of this thread; None if nothing is recorded."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return None if mode is None else mode.tracer


def constant_or_node(tracer: Any, tensor: torch.Tensor) -> torch.Tensor | torch.fx.Node | None:
    """Return the value of a tensor if the recorder knows it, else its node, if it has one."""
    slot = tracer.tensor_tracker.get(tensor)
    if slot is None:
        return None
    return slot.proxy.node if slot.constant is None else slot.constant  # type: ignore[no-any-return]


def track(tracer: Any, tensor: torch.Tensor, node: torch.fx.Node) -> None:
    """Record that a node computes a tensor."""
    tracer.tensor_tracker[tensor] = _ProxyTensor(torch.fx.Proxy(node, tracer), None)


def add_call(
    graph: torch.fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.fx.Node:
    """Add the node of a call to a graph, under the name that the recorder would give it.

    ``Graph.create_node`` also looks for symbolic numbers in the arguments; a trace has none.
    """
    is_operator = isinstance(target, OpOverload)
    name = graph._target_to_str(target.overloadpacket.__name__) if is_operator else None
    node = graph.create_node("call_function", target, name=name)
    node.args = args
    if kwargs:
        node.kwargs = kwargs
    return node
