"""``optimizer.step()`` in the body of a device loop: new weights, as in eager PyTorch.

A step is recorded where it is called: ``popsim::step`` gives the new weights, which are copied into
the old ones. So reads after it see the new values, autograd knows that a weight has changed, and
views see it. An update at the end of a whole iteration can be faster (ops that are fused with
products, that update all weights together, that accumulate several iterations). So if nothing reads
the weights after a step, ``leave_to_the_end`` removes the step from the graph again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from popsim_torch.errors import InternalError
from popsim_torch.private_torch.modes import DisableTorchFunction
from popsim_torch.private_torch.operators import OpOverload, schema_of
from popsim_torch.trace.graph.functionalise import unchanged
from popsim_torch.trace.graph.markers import NAMESPACE
from popsim_torch.trace.graph.origin import origin_of
from popsim_torch.trace.graph.parts import is_in_place, is_view
from popsim_torch.trace.graph.traced_tensors import current_graph, find_node
from popsim_torch.typed_torch import new_library

__all__ = ["STEP", "StepInIteration", "WeightStep", "leave_to_the_end", "record_step"]


def _register() -> Any:
    library = new_library(NAMESPACE, "FRAGMENT")
    library.define("step(Tensor[] weights, Tensor[] gradients, int key) -> Tensor[]")
    torch.library.register_fake(
        f"{NAMESPACE}::step",
        lambda weights, gradients, key: [torch.empty_like(weight) for weight in weights],
        lib=library,
    )
    return library


_library = _register()  # the operator exists as long as this object

STEP = torch.ops.popsim.step.default


@dataclass(frozen=True)
class WeightStep:
    """A call of ``optimizer.step()``.

    Attributes:
        optimizer: The optimizer.
        source: The place of the call, for messages.
        gradients: The gradients that it uses, by the parameter's name.
        nodes: The nodes that were recorded for it, in order.
    """

    optimizer: torch.optim.Optimizer
    source: str
    gradients: Mapping[str, torch.Tensor]
    nodes: Sequence[torch.fx.Node]


@dataclass(frozen=True)
class StepInIteration:
    """A step that runs where it is called, not at the end of an iteration.

    Attributes:
        parameters: Names of the parameters that change, in the order of the node's arguments.
        source: The place of the call, for messages.
        used: The place where its weights are used after it, or where its gradients are changed.
    """

    parameters: tuple[str, ...]
    source: str
    used: str

    @property
    def why_at_once(self) -> str:
        """The reason why it does not run at the end of the iteration, as a part of a sentence."""
        if not self.used:
            return "the body calls step() again for the same weights"
        return f"the body at {self.used} uses its weights, or changes its gradients, after step()"


def record_step(
    weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], key: int
) -> list[torch.fx.Node]:
    """Record the change of weights by an optimizer's step.

    Args:
        weights: The traced parameters.
        gradients: The gradient of each parameter, of the same shape.
        key: The number of the step.

    Returns:
        The nodes that were recorded.
    """
    graph = current_graph()
    if graph is None:
        raise InternalError("trace: a step is called while no graph is recorded")
    node = next(reversed(graph.nodes))
    with torch.no_grad(), DisableTorchFunction():
        changed = STEP(weights, gradients, key)
        for weight, new in zip(weights, changed, strict=True):
            weight.copy_(new)
    nodes = []
    while (node := node.next).op != "root":
        nodes.append(node)
    return nodes


def leave_to_the_end(
    steps: Mapping[int, WeightStep], weights: Mapping[str, torch.Tensor]
) -> dict[int, str]:
    """Remove those steps from the graph that can also run at the end of an iteration.

    Args:
        steps: All steps, by key.
        weights: The traced parameters by name.

    Returns:
        The steps that stay: the place where their weights are read after the step, by key.
    """
    graph = current_graph()
    if graph is None or not steps:
        return {}
    order = {node: position for position, node in enumerate(graph.nodes)}
    named = {name for step in steps.values() for name in step.gradients}
    seen = {name: [user for user, _ in _uses(_placeholder_of(weights[name]))] for name in named}
    staying: dict[int, str] = {}
    at_end: set[str] = set()
    for key, step in reversed(list(steps.items())):
        found = _used_behind(step, seen, order)
        if found is not None or not at_end.isdisjoint(step.gradients):
            staying[key] = "" if found is None else origin_of(found).source
            continue
        at_end.update(step.gradients)
        for node in reversed(step.nodes):
            graph.erase_node(node)
        gone = set(step.nodes)
        for name in step.gradients:
            seen[name] = [user for user in seen[name] if user not in gone]
    return staying


def _used_behind(
    step: WeightStep,
    seen: Mapping[str, Sequence[torch.fx.Node]],
    order: Mapping[torch.fx.Node, int],
) -> torch.fx.Node | None:
    """Return a node after a step that reads its weights or changes its gradients."""
    end = order[step.nodes[-1]]
    for name, tensor in step.gradients.items():
        # The step itself reads copies of gradients that are conjugated lazily.
        gradient = find_node(tensor)
        if gradient is None:
            raise InternalError("trace: a gradient of a step has no node in the graph")
        # (a change in place has given it another node)
        changes = [user for user, changed in _uses(unchanged(gradient)) if changed]
        for user in (*seen[name], *changes):
            if order[user] > end:
                return user
    return None


def _placeholder_of(tensor: torch.Tensor) -> torch.fx.Node:
    """Return the node of a parameter before all changes of the parameter."""
    node = find_node(tensor)
    while node is not None and is_in_place(node):
        source: Any = node.args[0]
        node = source
    if node is None:
        raise InternalError("trace: a parameter of a loop has no node in the graph")
    return node


def _uses(node: torch.fx.Node) -> Iterator[tuple[torch.fx.Node, bool]]:
    """Yield the nodes that read a tensor, also through views, and whether they change it."""
    todo, met = [node], {node}
    while todo:
        one = todo.pop()
        for user in one.users:
            if user in met:
                continue
            met.add(user)
            same = is_in_place(user) and user.args[0] is one
            yield user, same or (_is_mutable(user) and not is_in_place(user))
            if same or is_view(user):
                todo.append(user)


def _is_mutable(node: torch.fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable
