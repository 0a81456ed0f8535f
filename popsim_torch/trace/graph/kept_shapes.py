"""Refuses changes in place of shapes that a program keeps.

They are those of inputs, parameters and buffers, and of what the body of a loop or branch reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.fx

from popsim_torch.errors import Error
from popsim_torch.private_torch.modes import DisableTorchFunction
from popsim_torch.private_torch.operators import opname
from popsim_torch.trace.graph.functionalise import is_mutating, unchanged
from popsim_torch.trace.graph.origin import origin_of
from popsim_torch.trace.graph.traced_tensors import find_node, traced_tensors

__all__ = ["CHANGES_SHAPE", "check_shapes_outside", "shapes_kept"]

CHANGES_SHAPE = frozenset(
    {
        *("as_strided_", "resize_", "resize_as_", "squeeze_", "swapaxes_", "swapdims_", "t_"),
        *("transpose_", "unsqueeze_"),
    }
)


@contextmanager
def shapes_kept(tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Check tensors after forward, or the body of a loop or branch, which runs in this scope.

    Args:
        tensors: The traced tensors that a program gets, by name.

    Raises:
        Error: One of them has another shape than before.
    """
    before = {name: (tuple(one.shape), find_node(one)) for name, one in tensors.items()}
    yield
    for name, tensor in tensors.items():
        shape, first = before[name]
        node = find_node(tensor)
        if node is None or tuple(tensor.shape) == shape:
            continue
        if unchanged(node) is first:  # else it has got the data of another tensor
            raise _refused(f"'{name}'", tensor, shape, _change(node))


def check_shapes_outside(last: torch.fx.Node) -> None:
    """Check that the body of a loop or branch has not changed the shape of other tensors.

    Args:
        last: The last node before the body.

    Raises:
        Error: A tensor that was made before the body has another shape than there.
    """
    for tensor, node in traced_tensors():
        outside = node
        while (
            last < outside and is_mutating(outside) and isinstance(outside.args[0], torch.fx.Node)
        ):
            outside = outside.args[0]
        if outside is node or last < outside:
            continue
        before = tuple(outside.meta["val"].shape)
        with DisableTorchFunction():
            after = tuple(tensor.shape)
        if after != before:
            raise _refused("a tensor from outside of the body", tensor, before, _change(node))


def _change(node: torch.fx.Node) -> torch.fx.Node:
    """Return the last node that has changed the shape of a tensor."""
    while opname(node.target) not in CHANGES_SHAPE and is_mutating(node):
        previous = node.args[0]
        if not isinstance(previous, torch.fx.Node):
            break
        node = previous
    return node


def _refused(
    name: str, tensor: torch.Tensor, before: tuple[int, ...], change: torch.fx.Node
) -> Error:
    source, method = origin_of(change).source, opname(change.target)
    return Error(
        f"forward{f' at {source}' if source else ''} changes the shape of {name} in place "
        f"({method}), from {before} to {tuple(tensor.shape)}. A compiled model keeps the shapes of "
        "what it is given, and of its parameters and buffers: make another tensor (x = "
        "x.unsqueeze(1) instead of x.unsqueeze_(1)), or change a copy (x.clone())."
    )
