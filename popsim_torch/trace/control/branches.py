"""A branch and its gradient, which is a branch on the same condition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx

from popsim_torch.dtypes import is_continuous
from popsim_torch.trace.control.calls import Call, Extension, zeros
from popsim_torch.trace.control.recording import Body, BodyRecorder, Tensors, add_copy, value_of
from popsim_torch.trace.graph.bodies import Branch
from popsim_torch.trace.graph.traced_tensors import node_of

__all__ = ["BranchCall"]


class BranchCall(Call):
    """A call of one of two functions.

    Args:
        recorder: The recorder of the functions.
        flag: The condition; true calls the first function.
        sides: The functions.
        arguments: The arguments of each of them.
    """

    def __init__(
        self,
        recorder: BodyRecorder,
        flag: torch.Tensor,
        sides: tuple[Body, Body],
        arguments: Sequence[Tensors],
    ) -> None:
        super().__init__(recorder)
        self._flag = flag
        self._sides = sides
        self._arguments = arguments
        self._state = self._changed_state(sides)
        captures = dict.fromkeys(node for body in sides for node in body.cut.captures)
        self._captures = [*dict.fromkeys([*captures, *self._state])]
        self._sources: dict[torch.fx.Node, torch.Tensor] = {}
        for body in sides:
            self._sources |= body.differentiated()

    def run(self) -> list[torch.Tensor]:
        """Add the branch, with its gradient if needed, and return its results."""
        self._bodies.origins.begin("If")
        tensors = [
            arguments[i]
            for body, arguments in zip(self._sides, self._arguments, strict=True)
            for i in body.inputs
        ]
        tensors += self._sources.values()
        given = [node_of(self._flag)]
        given += [node_of(t) for arguments in self._arguments for t in arguments]
        given += self._captures
        differentiates = any(tensor.requires_grad for tensor in tensors)
        kept = [add_copy(node) for node in given] if differentiates else []
        num_results = self._sides[0].num_results
        state: list[torch.Tensor] = []

        def forward() -> list[torch.Tensor]:
            if_true, if_false = (self._function(side) for side in (0, 1))
            results = self._bodies.call(Branch(if_true, if_false, num_results), given)
            state[:] = results[num_results:]
            return results[:num_results]

        def backward(gradients: Sequence[torch.Tensor | None]) -> Iterator[Any]:
            yield from self._gradients(kept, gradients)

        results = self._apply(forward, backward, tensors)
        self._write_state(self._state, state)
        return results

    def _inputs(self, side: int, graph: Extension) -> list[torch.fx.Node]:
        """Return the nodes in a body for all inputs of the branch."""
        body = self._sides[side]
        inputs = []
        for other, arguments in enumerate(self._arguments):
            for position, argument in enumerate(arguments):
                own = body.cut.input(position) if other == side else graph.input(argument)
                inputs.append(own)
        known = body.placeholders()
        inputs += [known.get(node) or graph.input(value_of(node)) for node in self._captures]
        return inputs

    def _function(self, side: int) -> torch.fx.GraphModule:
        body = self._sides[side]
        graph = Extension(body.cut)
        inputs = self._inputs(side, graph)
        changed = body.changed()
        first = len(inputs) - len(self._captures)
        stands_for = dict(zip(self._captures, inputs[first:], strict=True))
        state = [changed.get(node, stands_for[node]) for node in self._state]
        return body.cut.function(inputs, [*body.results, *state])

    def _gradients(
        self, kept: Sequence[torch.fx.Node], gradients: Sequence[torch.Tensor | None]
    ) -> Iterator[Any]:
        """Yield the gradients of the arguments of both functions, then of the tensors they read."""
        results = [value_of(node) for node in self._sides[0].results]
        floating = [i for i, value in enumerate(results) if is_continuous(value.dtype)]
        starts = [zeros(results[i]) if gradients[i] is None else gradients[i] for i in floating]
        nodes = [node_of(start) for start in starts if start is not None]
        functions = [self._gradient_function(side, floating) for side in (0, 1)]
        yield from self._bodies.call(
            Branch(functions[0], functions[1], is_gradient=True), [kept[0], *nodes, *kept[1:]]
        )

    def _gradient_function(self, side: int, floating: Sequence[int]) -> torch.fx.GraphModule:
        body = self._sides[side]
        graph = Extension(body.cut)
        inputs: list[torch.fx.Node] = []
        for position in floating:
            place = body.seeds[position]
            like = value_of(body.results[position])
            inputs.append(graph.input(like) if place is None else body.cut.input(place))
        inputs += self._inputs(side, graph)
        results: list[torch.fx.Node] = []
        for other, arguments in enumerate(self._arguments):
            own = body.gradients() if other == side else {}
            for position in self._sides[other].inputs:
                gradient = own.get(position)
                results.append(graph.zeros(arguments[position]) if gradient is None else gradient)
        sources = body.source_gradients()
        results += [
            sources[node] if node in sources else graph.zeros(tensor)
            for node, tensor in self._sources.items()
        ]
        return body.cut.function(inputs, results, repeats=self._bodies.controls)
