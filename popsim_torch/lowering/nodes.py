"""Lowers the nodes of a trace one by one; a loop or branch with the nodes of its bodies."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from popsim_torch.ir import Attribute, Tensor
from popsim_torch.ir.offers import Offers
from popsim_torch.lowering.accumulated import AccumulatedLowering
from popsim_torch.lowering.emit.builder import BodyBuilder, Builder, Place, Value
from popsim_torch.lowering.rules.prints import lower_print
from popsim_torch.lowering.rules.table import RULES
from popsim_torch.lowering.steps import StepLowering, is_put_there
from popsim_torch.trace.books.accumulated import ACCUMULATED, KEEP_ACCUMULATED
from popsim_torch.trace.books.weight_steps import STEP
from popsim_torch.trace.graph.bodies import (
    CONTROL,
    Branch,
    Control,
    Loop,
    control_of,
    placeholders_of,
    results_of,
)
from popsim_torch.trace.graph.functionalise import is_mutating
from popsim_torch.trace.graph.markers import CONSTANT, MARK, PRINT
from popsim_torch.trace.named_graph import NamedGraph

__all__ = ["OWN_TARGETS", "NodeLowering"]

OWN_TARGETS = (operator.getitem, PRINT, CONSTANT, CONTROL, STEP, ACCUMULATED, KEEP_ACCUMULATED)
"""Functions that nodes call and that are no operators of PyTorch."""


class NodeLowering:
    """Adds the ops for a trace's nodes to the graph of a program, or to a body.

    Args:
        named: The trace.
        offers: Knows which tensors of bodies are requested.
        steps: Adds updates in the middle of an iteration, if there are any.
        accumulated: Adds accumulations that hooks of the user see; None if nothing is trained.
    """

    def __init__(
        self,
        named: NamedGraph,
        offers: Offers,
        steps: StepLowering | None,
        accumulated: AccumulatedLowering | None = None,
    ) -> None:
        self._named = named
        self._offers = offers
        self._steps = steps
        self._accumulated = accumulated

    def lower(self, builder: Builder, node: torch.fx.Node) -> None:
        """Add the ops of a node, and name its result."""
        value = self._value_of(builder, node)
        builder.values[node] = value
        name = self._named.names.get(node)
        # A value that a gradient computes again has its names where it is computed first.
        if (
            name is not None
            and isinstance(value, Tensor)
            and (builder.named or node.target is MARK)
        ):
            builder.graph.set_name(value, name)

    def _value_of(self, builder: Builder, node: torch.fx.Node) -> Value:
        if node.target is operator.getitem:
            producer: Any = node.args[0]
            values: Any = builder.values[producer]
            value: Value = values[node.args[1]]
            return value
        place = builder.place_of(node, self._named.message_name(node))
        if node.target is STEP:
            assert self._steps is not None
            return self._steps.lower(node, place)
        if node.target in (ACCUMULATED, KEEP_ACCUMULATED):
            assert self._accumulated is not None
            return self._accumulated.lower(node, place)
        if is_put_there(node):
            return builder.values[node.args[1]]  # type: ignore[index]
        control = control_of(node, self._named.traced.controls)
        if control is not None:
            given: Any = node.args[0]
            inputs = [builder.contiguous(builder.tensor(source), place) for source in given]
            if isinstance(control, Loop):
                return list(self._loop(builder, control, inputs, place))
            return list(self._branch(builder, control, inputs, place))
        if node.target is PRINT:
            return lower_print(builder, self._named, node, place)
        if node.target is CONSTANT:
            index: Any = node.args[2]
            return builder.constant(self._named.traced.constants[index])
        if is_mutating(node):
            return None
        return RULES.rule_of(node).lower(builder, node, place)

    # Requested tensors of bodies are further results. For a loop they are the values in each
    # iteration; for a branch that is not taken they are zeros.

    def _loop(
        self, builder: Builder, loop: Loop, inputs: Sequence[Tensor], place: Place
    ) -> list[Tensor]:
        body = _begin(builder, loop, loop.body)
        asked = self._fill(body, loop.body)
        if loop.conditional or not loop.count:
            asked = {}  # there is no iteration, or their number is not known
        body.yields([*map(body.tensor, results_of(loop.body)), *asked.values()])
        attributes: dict[str, Attribute] = {
            "count": loop.count,
            "carried": loop.carried,
            "sliced": loop.sliced,
            "reverse": loop.reverse,
            "conditional": loop.conditional,
        }
        attributes = {k: v for k, v in attributes.items() if v or k in ("count", "carried")}
        results = [builder.value(dtype, shape) for shape, dtype in loop.types]
        for name, tensor in asked.items():
            results.append(builder.value(tensor.dtype, (loop.count, *tensor.shape)))
            builder.graph.set_name(results[-1], name)
        builder.op(
            "loop",
            [*inputs, *body.outside],
            results,
            attributes,
            place=place,
            fixed_phase=True,
            bodies=[body.graph],
        )
        return results[: len(loop.types)]

    def _branch(
        self, builder: Builder, branch: Branch, inputs: Sequence[Tensor], place: Place
    ) -> list[Tensor]:
        bodies = [_begin(builder, branch, function) for function in branch.bodies]
        bodies[0].twin, bodies[1].twin = bodies[1], bodies[0]
        found = list(map(self._fill, bodies, branch.bodies))
        asked = found[0] | found[1]
        for body, function, own in zip(bodies, branch.bodies, found, strict=True):
            further = [own.get(name) or _zeros(body, like) for name, like in asked.items()]
            body.yields([*map(body.tensor, results_of(function)), *further])
        results = [builder.value(dtype, shape) for shape, dtype in branch.types]
        for name, tensor in asked.items():
            results.append(builder.value(tensor.dtype, tensor.shape))
            builder.graph.set_name(results[-1], name)
        builder.op(
            "branch",
            [*inputs, *bodies[0].outside],
            results,
            place=place,
            fixed_phase=True,
            bodies=[body.graph for body in bodies],
        )
        return results[: len(branch.types)]

    def _fill(self, body: BodyBuilder, function: torch.fx.GraphModule) -> dict[str, Tensor]:
        """Lower the nodes of a body; return its requested tensors, by name."""
        for node in function.graph.nodes:
            if node.op == "call_function":
                self.lower(body, node)
        return self._offers.of_body(body.graph)


def _begin(outer: Builder, control: Control, function: torch.fx.GraphModule) -> BodyBuilder:
    """Return a new body with inputs and without ops."""
    named = outer.named and not control.is_gradient
    body = BodyBuilder(outer, list(function.graph.nodes), named)
    for node in placeholders_of(function):
        value: torch.Tensor = node.meta["val"]
        body.values[node] = body.given(value.dtype, value.shape)
    return body


def _zeros(body: BodyBuilder, like: Tensor) -> Tensor:
    """Return zeros that replace a tensor of the other body."""
    return body.constant(torch.zeros(like.shape, dtype=like.dtype, device="cpu"))
