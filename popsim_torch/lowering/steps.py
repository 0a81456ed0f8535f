"""Updates of weights within an iteration, if the body of a device loop reads them afterwards.

In the trace, an update returns new weights and does not change the old ones. On the device, it
overwrites the weights in place: after it, a node for the new weights uses the same memory. Later
readers of older weights get a copy.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from popsim_torch.ir import Tensor
from popsim_torch.lowering.emit.builder import Builder, Place, Value
from popsim_torch.lowering.rules.views import another_name
from popsim_torch.lowering.update import UpdateLowering
from popsim_torch.optim.plan import OptimizerPlan
from popsim_torch.trace.books.weight_steps import STEP
from popsim_torch.trace.named_graph import NamedGraph

_COPY = torch.ops.aten.copy.default
_COPY_ = torch.ops.aten.copy_.default


class StepLowering:
    """Adds the updates of steps, in the order of the trace.

    Args:
        builder: The graph under construction.
        named: The trace.
        needed: The nodes that are lowered.
        plan: The update of each parameter.
        lowering: Adds the ops of updates.
    """

    def __init__(
        self,
        builder: Builder,
        named: NamedGraph,
        needed: set[torch.fx.Node],
        plan: OptimizerPlan,
        lowering: UpdateLowering,
    ) -> None:
        self._builder = builder
        self._needed = needed
        self._plan = plan
        self._lowering = lowering
        self._names = {key: step.parameters for key, step in named.traced.steps.items()}
        self._order = {node: position for position, node in enumerate(named.nodes)}
        at_end = named.traced.gradients
        last = {name: key for key, names in self._names.items() for name in names}
        self._last = {name: key for name, key in last.items() if name not in at_end}

    def lower(self, node: torch.fx.Node, place: Place) -> Value:
        """Add the updates of a step; return the weights after the step."""
        given: Any = node.args
        sources, gradients, key = given
        weights = [self._lowering.weight(name) for name in self._names[key]]
        self._keep_older(node, weights, place)
        for weight, source in zip(weights, sources, strict=True):
            self._put(weight, self._builder.tensor(source), place)
        self._lowering.step(
            self._plan,
            dict(zip(self._names[key], map(self._builder.tensor, gradients), strict=True)),
            place,
            named={name for name in self._names[key] if self._last.get(name) == key},
        )
        return [another_name(self._builder, weight) for weight in weights]

    def _put(self, weight: Tensor, value: Tensor, place: Place) -> None:
        """Write a value that user code has assigned to a weight into the memory of the weight."""
        if is_all_of(weight, value):
            return
        if self._builder.graph.root(value) is weight:  # the same memory in another order
            value = self._copy(value, place)
        self._builder.op("copy", [value], [another_name(self._builder, weight)], place=place)

    def _copy(self, tensor: Tensor, place: Place) -> Tensor:
        copy = self._builder.value(tensor.dtype, tensor.shape)
        self._builder.op("copy", [tensor], [copy], place=place)
        return copy

    def _keep_older(self, step: torch.fx.Node, weights: Sequence[Tensor], place: Place) -> None:
        """Copy the weights whose values from before a step are read after it.

        In eager PyTorch such a reader has a ``clone`` of the weight; in the program a clone is only
        a view.
        """
        builder, graph = self._builder, self._builder.graph
        changing = {weight.id: weight for weight in weights}
        copies: dict[int, Tensor] = {}

        def changes(tensor: Tensor | None) -> bool:
            return tensor is not None and graph.root(tensor).id in changing

        def kept(tensor: Tensor | None) -> Tensor | None:
            if tensor is None or not changes(tensor):
                return tensor
            root = graph.root(tensor).id
            if root not in copies:
                copies[root] = self._copy(changing[root], place)
            seen = tensor.shape, tensor.strides, tensor.offset
            return graph.add_view(copies[root], *seen, dtype=tensor.dtype)

        for node, value in builder.values.items():
            parts = value if isinstance(value, list) else [value]
            if any(map(changes, parts)) and self._is_read_behind(node, step):
                older = list(map(kept, parts))
                builder.values[node] = older if isinstance(value, list) else older[0]
        builder.forget_copies(changing)

    def _is_read_behind(self, node: torch.fx.Node, step: torch.fx.Node) -> bool:
        return any(
            user in self._needed
            and self._order[user] > self._order[step]
            and not _replaces(user, node)
            for user in node.users
        )


def is_all_of(weight: Tensor, value: Tensor) -> bool:
    """Return whether a tensor is a whole weight, with the same memory layout."""
    if value is weight:
        return True
    return value.base == weight.id and value.covers(weight) and value.shape == weight.shape


def is_put_there(node: torch.fx.Node) -> bool:
    """Return whether a node is a weight into which the result of a step was copied."""
    if node.target is not _COPY:
        return False
    source: Any = node.args[1]
    return source.target is operator.getitem and source.args[0].target is STEP


def _replaces(user: torch.fx.Node, node: torch.fx.Node) -> bool:
    """Return whether a node overwrites a tensor with another value, and does not read it."""
    return user.target in (_COPY, _COPY_) and user.args[0] is node and user.args[1] is not node
