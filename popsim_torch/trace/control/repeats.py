"""Copies of graphs for a gradient that computes once more what has been computed: they are quiet.

Prints of values come with the first computation; those of gradients are the gradient's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.fx

from popsim_torch.private_torch.graph_modules import make_graph_module
from popsim_torch.trace.graph.bodies import Branch, Control, control_of
from popsim_torch.trace.graph.enqueues import ENQUEUE
from popsim_torch.trace.graph.markers import PRINT
from popsim_torch.trace.graph.origin import is_of_hook, origin_of

__all__ = ["copy_quietly"]

Known = dict[torch.fx.Node, torch.fx.Node]


def copy_quietly(
    graph: torch.fx.Graph, node: torch.fx.Node, known: Known, controls: list[Control]
) -> None:
    """Copy a node to a graph, without what it shows of values: prints, elements of queues.

    Args:
        graph: Gets the copy.
        node: Of a graph that has been computed already.
        known: The copies of other nodes; gets this one.
        controls: Those of the trace; gets loops and branches that print nothing.
    """
    if _enqueues(node):
        return
    if _prints(node):
        source: Any = node.args[0]
        known[node] = known[source]
        return
    known[node] = graph.node_copy(node, known.__getitem__)
    control = control_of(node, controls)
    if control is not None and _prints_in(control, controls):
        controls.append(_quiet(control, controls))
        known[node].update_arg(1, len(controls) - 1)


def _prints(node: torch.fx.Node) -> bool:
    return node.target is PRINT and not origin_of(node).backward


def _enqueues(node: torch.fx.Node) -> bool:
    return node.target is ENQUEUE and not is_of_hook(node)


def _prints_in(control: Control, controls: list[Control]) -> bool:
    for body in control.bodies:
        for node in body.graph.nodes:
            inner = control_of(node, controls)
            if (
                _prints(node)
                or _enqueues(node)
                or (inner is not None and _prints_in(inner, controls))
            ):
                return True
    return False


def _quiet(control: Control, controls: list[Control]) -> Control:
    if isinstance(control, Branch):
        if_true, if_false = (_quiet_body(body, controls) for body in control.bodies)
        return replace(control, if_true=if_true, if_false=if_false)
    return replace(control, body=_quiet_body(control.body, controls))


def _quiet_body(body: torch.fx.GraphModule, controls: list[Control]) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    known: Known = {}
    for node in body.graph.nodes:
        copy_quietly(graph, node, known, controls)
    return make_graph_module({}, graph)
