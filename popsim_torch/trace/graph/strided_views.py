"""Makes ``as_strided`` independent of layouts, before mutation is removed from a graph.

Its strides refer to the memory of the tensor that its input is a view of. Without mutation, a view
is a copy with a layout of its own, and so is the new value of a changed tensor. So ``as_strided``
gets a view of that tensor in which all elements are in one dimension, in the order of the memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from popsim_torch.private_torch.fake import FakeTensorMode
from popsim_torch.private_torch.modes import disable_current_modes
from popsim_torch.private_torch.operators import OpOverload
from popsim_torch.trace.graph.parts import is_in_place, is_view, viewed

__all__ = ["add_call_like", "is_whole", "memory_order", "refer_to_memory"]

aten = torch.ops.aten


def refer_to_memory(graph: torch.fx.Graph) -> None:
    """Let the ``as_strided`` nodes of a graph read the tensors that their inputs are views of.

    Args:
        graph: A graph of ATen operators with fake tensors in ``meta["val"]``.
    """
    for node in list(graph.nodes):
        if node.target is aten.as_strided.default:
            _refer_to_memory(graph, node)


def _refer_to_memory(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    arguments: Any = node.args
    source, size, stride, *offset = arguments
    owner = source
    while is_view(owner) or is_in_place(owner):
        owner = viewed(owner)
    seen, value = source.meta["val"], owner.meta.get("val")
    if not _have_same_elements(seen, value):
        owner, value = source, seen
    first = offset[0] if offset else node.kwargs.get("storage_offset")
    first = seen.storage_offset() if first is None else first
    if is_whole(value) and first >= value.storage_offset():
        with graph.inserting_before(node):
            owner = _in_one_dimension(graph, owner, node)
        first -= value.storage_offset()
    node.args, node.kwargs = (owner, size, stride, first), {}


def _in_one_dimension(
    graph: torch.fx.Graph, tensor: torch.fx.Node, like: torch.fx.Node
) -> torch.fx.Node:
    value = tensor.meta["val"]
    if value.dim() == 1:
        return tensor
    order, fake_mode = memory_order(value), value.fake_mode
    if order != sorted(order):
        tensor = add_call_like(graph, like, fake_mode, aten.permute.default, tensor, order)
    return add_call_like(graph, like, fake_mode, aten.view.default, tensor, [value.numel()])


def _have_same_elements(one: Any, other: Any) -> bool:
    """Return whether the elements of two tensors with one memory mean the same."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    kinds = {(value.dtype, value.is_conj(), value.is_neg()) for value in (one, other)}
    return len(kinds) == 1


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has all elements of its part of the memory, each of them once."""
    return tensor.permute(memory_order(tensor)).is_contiguous()


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions of a tensor in the order of the memory."""
    sizes = list(zip(tensor.stride(), tensor.shape, strict=True))
    return sorted(range(tensor.dim()), key=lambda dim: sizes[dim], reverse=True)


def add_call_like(
    graph: torch.fx.Graph,
    like: torch.fx.Node,
    fake_mode: FakeTensorMode,
    target: OpOverload,
    *args: Any,
    **kwargs: Any,
) -> torch.fx.Node:
    """Add the call of an operator, with its value and with the origin of another node.

    Args:
        graph: Receives the node.
        like: The other node.
        fake_mode: The mode of the values.
        target: The operator.
        *args: Its arguments.
        **kwargs: Its keyword arguments.
    """
    made = graph.call_function(target, args, kwargs)
    made.meta = {name: entry for name, entry in like.meta.items() if name != "val"}
    given: Any = torch.fx.node.map_arg((args, kwargs), lambda one: one.meta["val"])
    with disable_current_modes(), fake_mode:
        made.meta["val"] = target(*given[0], **given[1])
    return made
