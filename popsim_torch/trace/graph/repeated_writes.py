"""Changes of a tensor that shows its elements several times, as ``expand`` makes it.

A fill writes one value, no matter how often. So it becomes a fill of the first repeat, at each
element that it meets in any repeat.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.fx

from popsim_torch.trace.graph.strided_views import add_call_like

__all__ = ["at_first_repeat", "repeated_dimensions"]

aten = torch.ops.aten

# They do the same to each element, and doing it again changes nothing.
_EVERYWHERE = frozenset(
    {
        aten.fill_.Scalar,
        aten.fill_.Tensor,
        aten.threshold_.default,
        aten.zero_.default,
    }
)
# They write one value to some elements: the position of the value.
_SOMEWHERE = {
    aten.index_fill_.int_Scalar: 3,
    aten.index_fill_.int_Tensor: 3,
    aten.index_put_.default: 2,
    aten.masked_fill_.Scalar: 2,
    aten.masked_fill_.Tensor: 2,
}
# They write zeros on one side of a diagonal: the operator that keeps that side, and the next
# diagonal there.
_TRIANGLES = {
    aten.tril_.default: (aten.triu.default, 1),
    aten.triu_.default: (aten.tril.default, -1),
}


def at_first_repeat(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
    """Return the change to make instead of one, with each element of its tensor shown once.

    Args:
        graph: Receives the nodes of the change, before ``node``, which changes nothing then.
        node: A node that changes its first argument.

    Returns:
        The node of the new change; ``node`` itself if no element is repeated, or if the result
        depends on the order of the repeats.
    """
    arguments: Any = node.args
    seen: torch.Tensor = arguments[0].meta["val"]
    repeated = repeated_dimensions(seen)
    if not repeated or not _is_fill(node):
        return node
    fake_mode: Any = seen.fake_mode  # type: ignore[attr-defined]
    call = functools.partial(add_call_like, graph, node, fake_mode)
    with graph.inserting_before(node):
        first = arguments[0]
        for dim in repeated:
            first = call(aten.slice.Tensor, first, dim, 0, 1)
        if node.target in _EVERYWHERE:
            change = call(node.target, first, *arguments[1:], **node.kwargs)
        else:
            places, value = _places(call, node)
            for dim in repeated:
                places = call(aten.any.dim, places, dim, True)
            is_tensor = isinstance(value, torch.fx.Node)
            fill = aten.masked_fill_.Tensor if is_tensor else aten.masked_fill_.Scalar
            change = call(
                fill, first, places, call(aten.view.default, value, []) if is_tensor else value
            )
    node.target, node.args, node.kwargs = aten.alias.default, (arguments[0],), {}
    return change


def repeated_dimensions(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions along which a tensor shows the same elements."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return [dim for dim, (size, stride) in enumerate(sizes) if size > 1 and stride == 0]


def _is_fill(node: torch.fx.Node) -> bool:
    if node.target is aten.index_put_.default:
        arguments: Any = node.args
        return arguments[2].meta["val"].numel() == 1 and not any(arguments[3:])
    return node.target in {*_EVERYWHERE, *_SOMEWHERE, *_TRIANGLES}


def _places(call: Any, node: torch.fx.Node) -> tuple[torch.fx.Node, Any]:
    """Return where a change writes, as a mask of the tensor's shape, and what."""
    arguments: Any = node.args
    target: Any = node.target
    seen: torch.Tensor = arguments[0].meta["val"]
    options = {"dtype": torch.bool, "device": seen.device}
    if target in _TRIANGLES:
        other, step = _TRIANGLES[target]
        diagonal = arguments[1] if len(arguments) > 1 else 0
        everywhere = call(aten.full.default, list(seen.shape), True, **options)
        return call(other, everywhere, diagonal + step), 0
    position = _SOMEWHERE[target]
    value = arguments[position]
    mark = (
        call(aten.full.default, [], True, **options) if isinstance(value, torch.fx.Node) else True
    )
    nowhere = call(aten.full.default, list(seen.shape), False, **options)
    return call(target, nowhere, *arguments[1:position], mark), value
