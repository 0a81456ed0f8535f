"""Calls of recorded functions: the common part of loops and branches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx

from popsim_torch.dtypes import is_continuous
from popsim_torch.errors import Error
from popsim_torch.private_torch.modes import DisableTorchFunction
from popsim_torch.trace.control.cut import Cut
from popsim_torch.trace.control.recording import Body, BodyRecorder, Tensors, value_of
from popsim_torch.typed_torch import apply

__all__ = ["Call", "Extension", "zeros"]


class _Differentiable(torch.autograd.Function):
    """A call of a control whose gradient is a call of another one."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *tensors: Any) -> Any:
        """Call ``forward`` and return its results to the user; ``tensors`` have gradients."""
        ctx.backward = backward
        ctx.tensors = tensors
        results = forward()
        ctx.mark_non_differentiable(*(r for r in results if not is_continuous(r.dtype)))
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of ``tensors``."""
        results = list(ctx.backward(gradients))
        if torch.is_grad_enabled():
            read = [*(gradient for gradient in gradients if gradient is not None), *ctx.tensors]
            results = apply(_NoGradient, len(results), *results, *read)
        return None, None, *results


class _NoGradient(torch.autograd.Function):
    """The identity for gradients that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, num_results: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the first tensors; the results depend on all."""
        return tuple(tensor.view_as(tensor) for tensor in tensors[:num_results])

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        """Refuse a second differentiation."""
        raise Error(
            "forward differentiates a gradient of a loop or branch again (create_graph=True), "
            "which is not supported. Compute the inner gradient in the body, or write a Python "
            "loop: all its iterations are recorded."
        )


class Call:
    """A control with all tensors that it reads, and maybe a gradient.

    Args:
        bodies: Records functions and adds calls of them.
    """

    def __init__(self, bodies: BodyRecorder) -> None:
        self._bodies = bodies

    def _apply(
        self,
        forward: Callable[[], list[torch.Tensor]],
        backward: Callable[[Sequence[Any]], Iterator[Any]],
        tensors: Tensors,
    ) -> list[torch.Tensor]:
        """Call ``forward``; ``backward`` computes the gradients of ``tensors``."""
        if not any(tensor.requires_grad for tensor in tensors):
            return forward()
        with DisableTorchFunction():
            results: Any = apply(_Differentiable, forward, backward, *tensors)
        for result in results:
            self._bodies.gradients.after_call(result)
        return list(results)

    def _write_state(self, nodes: Sequence[torch.fx.Node], values: Tensors) -> None:
        """Write the new values of parameters and buffers that a body has changed."""
        for node, value in zip(nodes, values, strict=True):
            state = self._bodies.scopes.state_of(node)
            if state is not None:
                with torch.no_grad(), DisableTorchFunction():
                    state.copy_(value)

    def _changed_state(self, bodies: Sequence[Body]) -> list[torch.fx.Node]:
        """Return the nodes of the parameters and buffers that bodies change."""
        nodes = dict.fromkeys(node for body in bodies for node in body.changed())
        return [node for node in nodes if self._bodies.scopes.state_of(node) is not None]


def zeros(value: torch.Tensor) -> torch.Tensor:
    """Return traced zeros of a tensor's shape and dtype."""
    with DisableTorchFunction():
        return torch.zeros(value.shape, dtype=value.dtype, device=value.device)


class Extension:
    """Adds nodes to the graph of a function, for its gradient.

    Args:
        cut: The function.
    """

    def __init__(self, cut: Cut) -> None:
        self._graph = cut.graph
        self._end = next(node for node in cut.graph.nodes if node.op == "output")

    def input(self, like: torch.Tensor) -> torch.fx.Node:
        """Return a further input of this shape and dtype."""
        first = next(iter(self._graph.nodes))
        with self._graph.inserting_before(first):
            node = self._graph.placeholder("given")
        node.meta["val"] = like
        return node

    def zeros(self, like: torch.Tensor) -> torch.fx.Node:
        """Return zeros of this shape and dtype."""
        options = {"dtype": like.dtype, "device": like.device}
        return self._add(torch.ops.aten.zeros.default, (list(like.shape),), like, options)

    def sum(self, a: torch.fx.Node, b: torch.fx.Node) -> torch.fx.Node:
        """Return the sum of two tensors of the same shape."""
        return self._add(torch.ops.aten.add.Tensor, (a, b), value_of(a))

    def _add(
        self, target: Any, args: tuple[Any, ...], like: torch.Tensor, options: Any = None
    ) -> torch.fx.Node:
        with self._graph.inserting_before(self._end):
            node = self._graph.call_function(target, args, options)
        node.meta["val"] = like
        return node
