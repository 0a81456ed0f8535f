"""Cuts the nodes of a function out of the graph in which it was recorded.

A body is recorded in the same graph as the rest of forward: so a body may contain everything that
forward may contain. Then its nodes are cut out, and become functions of the values they read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from popsim_torch.errors import Error
from popsim_torch.private_torch.graph_modules import make_graph_module
from popsim_torch.private_torch.modes import DisableTorchFunction
from popsim_torch.private_torch.operators import OpOverload
from popsim_torch.private_torch.proxies import get_proxy_mode
from popsim_torch.private_torch.tensors import storage_key
from popsim_torch.trace.graph.bodies import (
    INPUT,
    Branch,
    Control,
    control_of,
    controls_known,
    placeholders_of,
    results_of,
    with_bodies,
)
from popsim_torch.trace.graph.enqueues import ENQUEUE
from popsim_torch.trace.graph.functionalise import functionalise_graph, is_check, is_mutating
from popsim_torch.trace.graph.markers import CONSTANT, PRINT
from popsim_torch.trace.graph.origin import is_of_hook, number_draw, origin_of
from popsim_torch.trace.graph.traced_tensors import host_computation

__all__ = ["Cut", "Recorded", "check_not_outside", "cut"]


@dataclass(frozen=True)
class Recorded:
    """The place of a function in the graph.

    Attributes:
        last_before: The last node of the graph before the call of the function.
        inputs: The nodes of its inputs, ``popsim::body_input``.
        results: The nodes of its results; None for a missing result.
    """

    last_before: torch.fx.Node
    inputs: Sequence[torch.fx.Node]
    results: Sequence[torch.fx.Node | None]


class Cut:
    """A function without mutation.

    Attributes:
        graph: Its nodes.
        captures: The nodes outside that it reads: they are its inputs after the arguments.
        changed: For captures that it changes in place: the index of each, and the new value.
        results: The results, as in ``Recorded``.
    """

    def __init__(
        self,
        module: torch.fx.GraphModule,
        num_inputs: int,
        captures: list[torch.fx.Node],
        present: Sequence[bool],
        controls: Sequence[Control],
    ) -> None:
        self.graph = module.graph
        self._placeholders = placeholders_of(module)
        self._num_inputs = num_inputs
        self.captures = captures
        found = iter(results_of(module))
        self.results: list[torch.fx.Node | None] = [
            next(found) if there else None for there in present
        ]
        writes = [node for node in module.graph.nodes if is_mutating(node)]
        self.changed: dict[int, torch.fx.Node] = {}
        for write in writes:
            target, value = write.args[:2]
            position = self._placeholders.index(target)
            if position >= num_inputs:
                self.changed[position - num_inputs] = value
        self._checks: dict[bool, list[torch.fx.Node]] = {False: [], True: []}
        for node in module.graph.nodes:
            if is_check(node, controls):
                self._checks[_is_of_gradient(node, controls)].append(node)

    def input(self, position: int) -> torch.fx.Node:
        """Return the node of one of its arguments."""
        return self._placeholders[position]

    def capture(self, position: int) -> torch.fx.Node:
        """Return the node of a value that it reads from outside."""
        return self._placeholders[self._num_inputs + position]

    def function(
        self,
        inputs: Sequence[torch.fx.Node],
        results: Sequence[torch.fx.Node],
        *,
        repeats: list[Control] | None = None,
    ) -> torch.fx.GraphModule:
        """Return the part of it that computes some results from some inputs.

        Args:
            inputs: Nodes of inputs and captures, in the order of the new function's.
            results: The results of the new function.
            repeats: Set if the new function is the gradient, which computes the values again:
                prints and checks of the values are left out. The trace's controls; receives those
                without prints.
        """
        graph = torch.fx.Graph()
        known: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in inputs:
            known[node] = graph.placeholder(node.name)
            known[node].meta = dict(node.meta)
        checks = self._checks[repeats is not None]
        for node in sorted(_needed([*results, *checks], known)):
            if repeats is None:
                known[node] = graph.node_copy(node, known.__getitem__)
            else:
                _copy_quietly(graph, node, known, repeats)
        graph.output([known[node] for node in results])
        return make_graph_module({}, graph)

    def reads(
        self, results: Sequence[torch.fx.Node], node: torch.fx.Node, *, gradient: bool
    ) -> bool:
        """Return whether some results, also of the gradient, depend on an input or a capture."""
        checks = self._checks[gradient]
        return node in results or any(
            node in other.all_input_nodes for other in _needed([*results, *checks], {})
        )


def _copy_quietly(
    graph: torch.fx.Graph,
    node: torch.fx.Node,
    known: dict[torch.fx.Node, torch.fx.Node],
    controls: list[Control],
) -> None:
    """Copy a node that is computed again, without its effects: prints, elements of queues.

    Args:
        graph: Receives the copy. It is a gradient; its own prints of gradients stay.
        node: A node of the function that has this gradient.
        known: The copies of other nodes; receives this one.
        controls: The controls of the trace; receives loops and branches that print nothing.
    """
    if _enqueues(node):
        return
    if _prints(node):
        source: Any = node.args[0]
        known[node] = known[source]
        return
    known[node] = graph.node_copy(node, known.__getitem__)
    control = control_of(node, controls)
    inside = with_bodies([node], controls)
    if control is not None and any(_prints(one) or _enqueues(one) for one in inside):
        controls.append(_quiet(control, controls))
        known[node].update_arg(1, len(controls) - 1)


def _prints(node: torch.fx.Node) -> bool:
    return node.target is PRINT and not origin_of(node).backward


def _enqueues(node: torch.fx.Node) -> bool:
    return node.target is ENQUEUE and not is_of_hook(node)


def _quiet(control: Control, controls: list[Control]) -> Control:
    if isinstance(control, Branch):
        if_true, if_false = (_quiet_body(body, controls) for body in control.bodies)
        return replace(control, if_true=if_true, if_false=if_false)
    return replace(control, body=_quiet_body(control.body, controls))


def _quiet_body(body: torch.fx.GraphModule, controls: list[Control]) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    known: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in body.graph.nodes:
        _copy_quietly(graph, node, known, controls)
    return make_graph_module({}, graph)


def _is_of_gradient(node: torch.fx.Node, controls: Sequence[Control]) -> bool:
    """Return whether a node belongs to the gradient of the function that contains it."""
    control = control_of(node, controls)
    return is_of_hook(node) if control is None else control.is_gradient


def _needed(
    results: Sequence[torch.fx.Node], known: Mapping[torch.fx.Node, object]
) -> set[torch.fx.Node]:
    """Return the nodes that results depend on, except those that are known."""
    needed = set[torch.fx.Node]()
    todo = list(results)
    while todo:
        node = todo.pop()
        if node not in needed and node not in known:
            needed.add(node)
            todo += node.all_input_nodes
    return needed


def cut(
    graph: torch.fx.Graph, recorded: Recorded, draws: Iterator[int], controls: Sequence[Control]
) -> tuple[Cut, set[torch.fx.Node]]:
    """Cut a function out of the graph in which it was recorded.

    The constants that it reads stay where they are in the graph.

    Args:
        graph: The graph.
        recorded: The place of the function.
        draws: Numbers for nodes that draw random numbers.
        controls: The loops and branches in its nodes.

    Returns:
        The function, and the nodes that were removed.

    Raises:
        Error: It changes a tensor from outside in place and also reads another view of the tensor.
    """
    inside = _nodes_behind(recorded.last_before)
    gone = [node for node in inside if not _is_constant(node)]
    region = set(gone)
    captures = list(
        dict.fromkeys(
            source
            for node in gone
            if node.target is not INPUT
            for source in node.all_input_nodes
            if source not in region
        )
    )
    captures += [
        node
        for node in recorded.results
        if node is not None and node not in region and node not in captures
    ]
    for node in gone:
        if _is_random(node):
            number_draw(node, draws)
    module = _function(gone, recorded, captures)
    _undo_changes(region)
    for node in reversed(gone):
        graph.erase_node(node)
    with controls_known(controls), DisableTorchFunction(), host_computation():
        functional, _ = functionalise_graph(module, ())
    present = [node is not None for node in recorded.results]
    result = Cut(functional, len(recorded.inputs), captures, present, controls)
    _check_one_view(result)
    return result, region


def _nodes_behind(last: torch.fx.Node) -> dict[torch.fx.Node, None]:
    """Return the nodes of a graph after one of them, in order."""
    nodes: dict[torch.fx.Node, None] = {}
    node = last.next
    while node.op != "root":
        nodes[node] = None
        node = node.next
    return nodes


def _undo_changes(gone: Collection[torch.fx.Node]) -> None:
    """Restore the nodes of tensors from outside that a function has changed in place."""
    mode: Any = get_proxy_mode()
    for slot in mode.tracer.tensor_tracker.values():
        node = slot.proxy.node
        while node in gone and is_mutating(node):
            node = node.args[0]
        if node not in gone and node is not slot.proxy.node:
            slot.proxy = torch.fx.Proxy(node, mode.tracer)


def _is_constant(node: torch.fx.Node) -> bool:
    return node.op == "get_attr" or node.target is CONSTANT


def _is_random(node: torch.fx.Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _function(
    nodes: Sequence[torch.fx.Node], recorded: Recorded, captures: Sequence[torch.fx.Node]
) -> torch.fx.GraphModule:
    """Return nodes as a function of inputs and captures, unchanged, with mutation."""
    graph = torch.fx.Graph()
    known: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in (*recorded.inputs, *captures):
        known[node] = graph.placeholder(node.name)
        known[node].meta = dict(node.meta)
    for node in nodes:
        if node not in known:
            known[node] = graph.node_copy(node, known.__getitem__)
    graph.output([known[node] for node in recorded.results if node is not None])
    return make_graph_module({}, graph)


def _check_one_view(body: Cut) -> None:
    """Refuse changes of a tensor from outside that are visible in another tensor from outside."""

    def memory(node: torch.fx.Node) -> int:
        value: Any = node.meta["val"]
        return storage_key(value)

    for position in body.changed:
        changed = body.captures[position]
        for other in body.captures:
            if other is not changed and memory(other) == memory(changed):
                raise Error(
                    "The body of a loop or branch changes a tensor from outside in place "
                    f"({origin_of(changed).source or 'of forward'}), but also reads another view "
                    "of it. Take the view inside of the body, or pass the tensor as an argument."
                )


def check_not_outside(
    graph: torch.fx.Graph, outputs: Sequence[torch.fx.Node], gone: Collection[torch.fx.Node]
) -> None:
    """Refuse tensors of a body that are used outside of it.

    Raises:
        Error: Forward has kept such a tensor and uses it.
    """
    users = [node for node in graph.nodes if any(i in gone for i in node.all_input_nodes)]
    users += [node for node in outputs if node in gone]
    if users:
        source = origin_of(users[0]).source
        raise Error(
            f"forward{f' at {source}' if source else ''} uses a tensor that was made in the body "
            "of a loop or branch, outside of it. Return the tensor from the body."
        )
