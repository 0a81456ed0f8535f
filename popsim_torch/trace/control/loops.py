"""A loop and its gradient, which is a loop from the last iteration to the first.

A differentiated loop keeps the carried values of each iteration; its gradient recomputes all other
values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx

from popsim_torch.errors import Error
from popsim_torch.trace.control.calls import Call, Extension, zeros
from popsim_torch.trace.control.recording import Body, BodyRecorder, Tensors, add_copy, value_of
from popsim_torch.trace.graph.bodies import Loop
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.trace.graph.traced_tensors import node_of

__all__ = ["LoopCall"]

_MAX_BYTES = 2**47  # the address space of a process


class LoopCall(Call):
    """Repeated calls of a function.

    Args:
        bodies: The recorder of the function.
        body: The function.
        values: The values of the first iteration.
        count: Number of iterations.
        conditional: Whether the loop ends when the first value is false; ``count`` is the maximum.
    """

    def __init__(
        self,
        bodies: BodyRecorder,
        body: Body,
        values: Tensors,
        count: int,
        conditional: bool = False,
    ) -> None:
        super().__init__(bodies)
        self._body = body
        self._values = values
        self._count = count
        self._conditional = conditional
        self._starts = [node_of(value) for value in values]
        self._state = self._changed_state([body])
        self._sources = body.differentiated()
        # The nodes in the body for the carried values.
        known = body.placeholders()
        self._carried = [body.cut.input(i) for i in range(len(values))]
        self._carried += [known[node] for node in self._state]
        changed = body.changed()
        self._next = [*body.results, *(changed[node] for node in self._state)]
        self._whole = [node for node in body.cut.captures if node not in self._state]

    def run(self) -> list[torch.Tensor]:
        """Add the loop, with its gradient if needed, and return its results."""
        self._bodies.origins.begin("Loop")
        tensors = [self._values[i] for i in self._body.inputs]
        tensors += self._sources.values()
        differentiates = any(tensor.requires_grad for tensor in tensors)
        if differentiates and self._conditional:
            raise Error(
                f"while_loop(){user_line(' at ')}: only supported in inference, because the number "
                "of iterations for a gradient is not known. Use poptorch.for_loop with "
                "a fixed count, or put the loop under torch.no_grad()."
            )
        kept = self._read_again() if differentiates else []
        self._check_size(kept)
        state: list[torch.Tensor] = []
        gradient = _LoopGradient(self, kept) if differentiates else None

        def forward() -> list[torch.Tensor]:
            results = self._add(kept)
            end = len(self._carried)
            if gradient is not None:
                gradient.keep([node_of(stack) for stack in results[end:]])
            state[:] = results[len(self._values) : end]
            return results[: len(self._values)]

        backward = gradient.backward if gradient is not None else _no_gradient
        results = self._apply(forward, backward, tensors)
        self._write_state(self._state, state)
        return results

    def _check_size(self, kept: Sequence[torch.fx.Node]) -> None:
        """Refuse to keep more values than a process can address."""
        for value in map(value_of, kept):
            size = math.prod(value.shape) * value.dtype.itemsize
            if self._count * size >= _MAX_BYTES:
                raise Error(
                    f"for_loop{user_line(' at ')}: {self._count} iterations are too many to be "
                    "differentiated: the values at the start of each one are kept for the "
                    "gradient. Use fewer iterations, or put the loop under torch.no_grad()."
                )

    def _read_again(self) -> list[torch.fx.Node]:
        """Return the carried values that the gradient reads."""
        gradients = self._gradient_nodes()
        return [node for node in self._carried if self._reads(gradients, node)]

    def _reads(self, gradients: Sequence[torch.fx.Node], node: torch.fx.Node) -> bool:
        return self._body.cut.reads(gradients, node, gradient=True)

    def _gradient_nodes(self) -> list[torch.fx.Node]:
        found = [node for node in self._body.gradients().values() if node is not None]
        return found + list(self._body.source_gradients().values())

    def _add(self, stacked: Sequence[torch.fx.Node]) -> list[torch.Tensor]:
        """Add the loop; stack some of the carried values at the beginning of each iteration."""
        cut = self._body.cut
        known = self._body.placeholders()
        results = [*self._next, *stacked]
        whole = [node for node in self._whole if cut.reads(results, known[node], gradient=False)]
        function = cut.function([*self._carried, *(known[node] for node in whole)], results)
        loop = Loop(
            function,
            self._count,
            len(self._carried),
            conditional=self._conditional,
            num_named=len(self._values),
        )
        return self._bodies.call(loop, [*self._starts, *self._state, *whole])


def _no_gradient(_gradients: Sequence[Any]) -> Iterator[Any]:
    yield from ()


class _LoopGradient:
    """The gradient of a loop: another loop, from the last iteration to the first.

    It carries the gradients of the carried values, and sums the gradients of what all iterations
    read.
    """

    def __init__(self, call: LoopCall, read: Sequence[torch.fx.Node]) -> None:
        self._call = call
        self._read = read
        body = call._body
        known = body.placeholders()
        wanted = call._gradient_nodes()
        self._whole = [node for node in call._whole if call._reads(wanted, known[node])]
        self._given = [known[node] for node in self._whole]
        self._kept = [add_copy(node) for node in self._whole]
        self._stacks: list[torch.fx.Node] = []

    def keep(self, stacks: list[torch.fx.Node]) -> None:
        """Record the stacks with the carried values of all iterations."""
        self._stacks = stacks

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> Iterator[Any]:
        """Yield the gradients of the values, then of the tensors that every iteration reads."""
        call, body = self._call, self._call._body
        sources = body.source_gradients()
        starts = [
            zeros(call._values[i]) if gradients[i] is None else gradients[i] for i in body.inputs
        ]
        starts += [zeros(tensor) for tensor in call._sources.values()]
        nodes = [node_of(start) for start in starts if start is not None]
        function = self._function([sources[node] for node in call._sources])
        loop = Loop(
            function,
            call._count,
            len(nodes),
            sliced=len(self._read),
            reverse=True,
            is_gradient=True,
        )
        results = call._bodies.call(loop, [*nodes, *self._stacks, *self._kept])
        yield from results

    def _function(self, added: Sequence[torch.fx.Node]) -> torch.fx.GraphModule:
        """Return the body's backward function, which adds ``added`` to running sums."""
        body = self._call._body
        own = body.gradients()
        inputs: list[torch.fx.Node] = []
        results: list[torch.fx.Node] = []
        graph = Extension(body.cut)
        for position in body.inputs:
            place = body.seeds[position]
            inputs.append(
                graph.input(value_of(body.results[position]))
                if place is None
                else body.cut.input(place)
            )
            gradient = own[position]
            results.append(graph.zeros(value_of(inputs[-1])) if gradient is None else gradient)
        for gradient in added:
            inputs.append(graph.input(value_of(gradient)))
            results.append(graph.sum(inputs[-1], gradient))
        inputs += [*self._read, *self._given]
        return body.cut.function(inputs, results, repeats=self._call._bodies.controls)
