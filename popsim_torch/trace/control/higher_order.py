"""PyTorch's operators that take functions, expressed as loops and branches of the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from popsim_torch.errors import Error
from popsim_torch.private_torch.operators import (
    HigherOrderOperator,
    cond_op,
    map_impl,
    scan_op,
    while_loop_op,
)
from popsim_torch.private_torch.trees import tree_flatten, tree_unflatten
from popsim_torch.trace.control.flow import ControlFlow
from popsim_torch.trace.graph.device import DEVICE
from popsim_torch.trace.graph.origin import user_line

__all__ = ["higher_order_call"]


def higher_order_call(
    flow: ControlFlow, operator: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return a function that computes an operator that takes functions; None if it is unknown."""
    call = _CALLS.get(operator)
    return None if call is None else lambda: call(flow, *args, **kwargs)


class _Flat:
    """A function whose result is a list of tensors, with the structure of the original result."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.structure: Any = None

    def __call__(self, *args: Any) -> list[Any]:
        leaves, self.structure = tree_flatten(self._function(*args))
        return leaves

    def restore(self, leaves: list[torch.Tensor]) -> Any:
        return tree_unflatten(leaves, self.structure)


def _cond(flow: ControlFlow, condition: Any, if_true: Any, if_false: Any, operands: Any) -> Any:
    first, second = _Flat(if_true), _Flat(if_false)
    results = flow.cond("torch.cond()", condition, (first, operands), (second, operands))
    return first.restore(results)


def _while_loop(
    flow: ControlFlow, condition: Any, body: Any, carried: Any, further: Any = ()
) -> Any:
    results = flow.while_loop(
        "while_loop()",
        lambda *values: condition(*values, *further),
        lambda *values: body(*values, *further),
        carried,
    )
    return tuple(results)


def _scan(
    flow: ControlFlow, combine: Callable[..., Any], init: Any, xs: Any, further: Any = ()
) -> Any:
    return _over_slices(flow, "scan()", combine, init, xs, further)


def _map(flow: ControlFlow, function: Callable[..., Any], xs: Any, further: Any = ()) -> Any:
    return _over_slices(flow, "map()", function, (), xs, further)


def _over_slices(
    flow: ControlFlow,
    name: str,
    function: Callable[..., Any],
    init: Sequence[torch.Tensor],
    xs: Sequence[torch.Tensor],
    further: Sequence[Any],
) -> Any:
    """Call a function with carried values and slices of tensors; stack its other results.

    The first iteration runs before the loop: it determines the size of the stacks. If gradients may
    be needed, all iterations are recorded one after the other, because a loop would keep the stacks
    of each iteration for its backward pass.
    """
    flat = _Flat(function)
    count, num_carried = len(xs[0]), len(init)
    first = flat(*init, *(x[0] for x in xs), *further)
    carried, given = first[:num_carried], first[num_carried:]
    if list(map(_kind, carried)) != list(map(_kind, init)):
        raise Error(
            f"{name}{user_line(' at ')}: the function returns the carried values "
            f"{', '.join(map(_kind, carried))}, but they must be {', '.join(map(_kind, init))}, "
            "like the values that it is called with. Convert them with .to(dtype), or reshape them."
        )
    places = [place for place, one in enumerate(given) if isinstance(one, torch.Tensor)]
    stacks = [[given[place]] for place in places]
    if torch.is_grad_enabled():
        for number in range(1, count):
            results = flat(*carried, *(x[number] for x in xs), *further)
            carried = results[:num_carried]
            for place, stack in zip(places, stacks, strict=True):
                stack.append(results[num_carried + place])
        stacked = [torch.stack(stack) for stack in stacks]
    else:

        def iteration(number: torch.Tensor, *values: torch.Tensor) -> list[torch.Tensor]:
            slices = (x.index_select(0, number).squeeze(0) for x in xs)
            results = flat(*values[:num_carried], *slices, *further)
            written = (
                stack.index_put((number,), results[num_carried + place].unsqueeze(0))
                for stack, place in zip(values[num_carried:], places, strict=True)
            )
            return [number + 1, *results[:num_carried], *written]

        empty = [stack[0].expand(count, *stack[0].shape).clone() for stack in stacks]
        start = torch.ones(1, dtype=torch.int32, device=DEVICE)
        _, *results = flow.for_loop(name, count - 1, iteration, [start, *carried, *empty])
        carried, stacked = results[:num_carried], results[num_carried:]
    for place, whole in zip(places, stacked, strict=True):
        given[place] = whole
    return flat.restore([*carried, *given])


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


_CALLS: dict[HigherOrderOperator, Callable[..., Any]] = {
    cond_op: _cond,
    map_impl: _map,
    scan_op: _scan,
    while_loop_op: _while_loop,
}
