"""Parts of a tensor whose position is a value of the run, as own operators.

``popsim::dynamic_slice`` reads a part, and ``popsim::dynamic_update`` returns the tensor with
another part in its place. Each is the gradient of the other. Slices wrap around the end of an axis;
the position of ``t[x]`` must be inside of the axis.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from types import EllipsisType, NoneType
from typing import Any, Protocol

import torch
import torch.fx

from popsim_torch.annotations.slices import as_index, slice_of_run
from popsim_torch.private_torch.operators import OpOverload, schema_of
from popsim_torch.trace.books.known_values import changed_arguments, memories_of
from popsim_torch.trace.graph.markers import NAMESPACE
from popsim_torch.trace.graph.traced_tensors import in_transform, is_traced, node_of
from popsim_torch.typed_torch import new_library

_SCHEMAS = (
    "dynamic_slice(Tensor x, Tensor start, int axis, int count, int step, bool wraps) -> Tensor",
    "dynamic_update(Tensor x, Tensor part, Tensor start, int axis, int step, bool wraps) -> Tensor",
)


def _slice(x: torch.Tensor, _start: object, axis: int, count: int, *_: object) -> torch.Tensor:
    shape = list(x.shape)
    shape[axis] = count
    return x.new_empty(shape)


def _update(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape)


def _keep_for_slice(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, start, ctx.axis, _count, *ctx.steps = inputs
    ctx.shape = x.shape
    ctx.save_for_backward(start)


def _slice_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    (start,) = ctx.saved_tensors
    zeros = gradient.new_zeros(()).expand(ctx.shape)
    result = torch.ops.popsim.dynamic_update(zeros, gradient, start, ctx.axis, *ctx.steps)
    return result, None, None, None, None, None


def _keep_for_update(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _x, part, start, ctx.axis, *ctx.steps = inputs
    ctx.shape = part.shape
    ctx.save_for_backward(start)


def _update_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    (start,) = ctx.saved_tensors
    place = (start, ctx.axis)
    zeros = gradient.new_zeros(()).expand(ctx.shape)
    of_x = torch.ops.popsim.dynamic_update(gradient, zeros, *place, *ctx.steps)
    of_part = torch.ops.popsim.dynamic_slice(gradient, *place, ctx.shape[ctx.axis], *ctx.steps)
    return of_x, of_part, None, None, None, None


def _register() -> Any:
    library = new_library(NAMESPACE, "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    for name, shape, backward, keep in (
        ("dynamic_slice", _slice, _slice_backward, _keep_for_slice),
        ("dynamic_update", _update, _update_backward, _keep_for_update),
    ):
        operator_name = f"{NAMESPACE}::{name}"
        torch.library.register_fake(operator_name, shape, lib=library)
        torch.library.register_autograd(operator_name, backward, setup_context=keep, lib=library)
    return library


_library = _register()  # the operators exist as long as this object

DYNAMIC_SLICE = torch.ops.popsim.dynamic_slice.default
DYNAMIC_UPDATE = torch.ops.popsim.dynamic_update.default


# t[x:x + k] and t[x]


class _Values(Protocol):
    """Knows the values of tensors during the trace."""

    def known(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the traced tensor for a parameter or buffer of the model, else ``tensor``."""

    def known_value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor; None if they differ from run to run."""


aten = torch.ops.aten

# Axis, first position, length of the part with gaps, step, whether it wraps around.
_Place = tuple[int, torch.Tensor, int, int, bool]
_POSITIONS = (torch.int8, torch.int16, torch.int32, torch.int64)  # uint8 is a mask
_MAX_DEPTH = 8  # for the comparison of arithmetic that occurs twice

_SAME_NUMBER = frozenset(
    {
        aten._to_copy.default,
        aten._unsafe_view.default,
        aten.alias.default,
        aten.clone.default,
        aten.detach.default,
        aten.squeeze.default,
        aten.view.default,
    }
)
_MOVED: dict[Any, Callable[[int, int], int]] = {
    aten.add.Tensor: operator.add,
    aten.sub.Tensor: operator.sub,
}


def slicing_call(
    values: _Values, name: str, args: tuple[Any, ...]
) -> Callable[[], torch.Tensor | None] | None:
    """Return a function for ``t[x:x + k]`` or ``t[x]``, or an assignment to it, with dynamic ``x``.

    The result is None for any other call.

    Args:
        values: Knows the values of tensors.
        name: The name of the called function.
        args: The positional arguments of the call.
    """
    if name not in ("__getitem__", "__setitem__") or not is_traced(args[0]):
        return None
    tensor, index, *assigned = args
    index = index if isinstance(index, tuple) else (index,)
    parts: list[_Place] = []
    rest: list[Any] = []
    axis = 0
    if _num_axes(index) > tensor.dim():
        return None
    for item in index:
        part = _part(values, item)
        if part is not None:
            parts.append((axis, *part, True))
            item = slice(None)
        elif (position := _position(values, item)) is not None:
            parts.append((axis, position, 1, 1, False))
            item = 0
        rest.append(item)
        axis += tensor.dim() - _num_axes(index) if item is Ellipsis else _num_axes((item,))
    if not parts:
        return None
    return functools.partial(
        _assign if assigned else _sliced, tensor, parts, tuple(rest), *assigned
    )


def _num_axes(index: tuple[Any, ...]) -> int:
    """Return how many axes of a tensor an index uses, without an ellipsis."""
    count = 0
    for item in index:
        is_mask = isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)
        count += item.dim() if is_mask else not isinstance(item, (NoneType, EllipsisType, bool))
    return count


def _part(values: _Values, item: Any) -> tuple[torch.Tensor, int, int] | None:
    """Return start, length and step of a slice; None if it does not have this form."""
    if not isinstance(item, slice):
        return None
    bounds = (item.start, item.stop)
    if not all(isinstance(b, torch.Tensor) and b.numel() == 1 for b in bounds):
        return None
    step = 1 if item.step is None else item.step
    if not isinstance(step, int) or all(values.known_value(b) is not None for b in bounds):
        return None
    start, stop = (values.known(b) for b in bounds)
    if not (is_traced(start) and is_traced(stop)):
        return None
    (first, offset), (last, end) = _number(node_of(start)), _number(node_of(stop))
    return (start, end - offset, step) if first and last and _is_same(first, last) else None


def _position(values: _Values, item: Any) -> torch.Tensor | None:
    """Return the dynamic position of an index; None if the index is something else."""
    if not isinstance(item, torch.Tensor) or item.dim() or item.dtype not in _POSITIONS:
        return None
    if in_transform() or values.known_value(item) is not None:
        return None
    position = values.known(item)
    return position if is_traced(position) else None


def _is_same(node: Any, other: Any, depth: int = _MAX_DEPTH) -> bool:
    """Return whether two nodes compute the same value from inputs that have not changed since."""
    if isinstance(node, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(node) == len(other) and all(
            _is_same(one, two, depth) for one, two in zip(node, other, strict=True)
        )
    if not (isinstance(node, torch.fx.Node) and isinstance(other, torch.fx.Node)):
        return type(node) is type(other) and bool(node == other)
    if node is other:
        return not _is_changed(node)
    target: Any = node.target
    return (
        depth > 0
        and target is other.target
        and isinstance(target, OpOverload)
        and target.namespace == "aten"
        and not schema_of(target).is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not node.kwargs
        and not other.kwargs
        and len(node.args) > 0
        and _is_same(node.args, other.args, depth - 1)
    )


def _is_changed(node: torch.fx.Node) -> bool:
    """Return whether a node's result was written to after it was computed."""
    memories = set(memories_of(node))
    following = node.next
    while following.op != "root":
        for changed in changed_arguments(following):
            if not memories.isdisjoint(memories_of(changed)):
                return True
        following = following.next
    return False


def _number(node: torch.fx.Node) -> tuple[torch.fx.Node | None, int]:
    """Return the node that a number was computed from, and the offset that was added to it.

    The node is None if a value on the way was changed in place.
    """
    offset = 0
    while True:
        args: Any = node.args
        if _is_changed(node):
            return None, 0
        if node.target in _SAME_NUMBER and not args[0].meta["val"].is_floating_point():
            node = args[0]
        elif node.target in _MOVED and not node.kwargs and isinstance(args[1], int):
            node, offset = args[0], _MOVED[node.target](offset, args[1])
        else:
            return node, offset


def _sliced(tensor: torch.Tensor, parts: Sequence[_Place], rest: tuple[Any, ...]) -> torch.Tensor:
    for axis, start, size, step, wraps in parts:
        tensor = slice_of_run(tensor, axis, start, size, step, wraps=wraps)
    return tensor if all(map(_is_whole, rest)) else tensor[rest]


def _is_whole(item: Any) -> bool:
    return isinstance(item, slice) and item.start is item.stop is item.step is None


def _assign(
    tensor: torch.Tensor, parts: Sequence[_Place], rest: tuple[Any, ...], value: Any
) -> None:
    """Assign to a part of the first part, and write the first part back into the tensor."""
    (axis, start, size, step, wraps), *others = parts
    part = slice_of_run(tensor, axis, start, size, step, wraps=wraps)
    if others:
        _assign(part, others, rest, value)
    else:
        part[rest] = value
    position = as_index(start)
    tensor.copy_(torch.ops.popsim.dynamic_update(tensor, part, position, axis, step, wraps))
