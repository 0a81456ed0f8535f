"""PyTorch's operators that take functions: what they are as loops and branches of the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.while_loop import while_loop_op
from torch._ops import HigherOrderOperator
from torch.utils._pytree import tree_flatten, tree_unflatten

from popsim_torch.trace.control.flow import ControlFlow

__all__ = ["higher_order_call"]


def higher_order_call(
    flow: ControlFlow, operator: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return what computes a call of an operator that takes functions; None for one not known."""
    call = _CALLS.get(operator)
    return None if call is None else lambda: call(flow, *args, **kwargs)


class _Flat:
    """A function whose result is a list of tensors, and how to make its own result of one."""

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


_CALLS: dict[HigherOrderOperator, Callable[..., Any]] = {
    cond_op: _cond,
    while_loop_op: _while_loop,
}
