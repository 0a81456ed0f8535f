"""A traced graph whose results have names: the input of lowering."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.fx

from popsim_torch.errors import Error
from popsim_torch.ir import names as spelling
from popsim_torch.trace.books.result import TraceResult
from popsim_torch.trace.graph.bodies import controls_in, with_bodies
from popsim_torch.trace.graph.functionalise import is_check, is_mutating
from popsim_torch.trace.graph.markers import MARK, PRINT
from popsim_torch.trace.graph.origin import draw_of, gradient_key_of
from popsim_torch.trace.names import NameTable


class NamedGraph:
    """The nodes of a trace, their names, and which of them are needed.

    Args:
        traced: The trace, without mutation.
        names: Name by node.
        aliases: Node by name, for additional names.

    Attributes:
        traced: The trace.
        nodes: All nodes, in order.
        placeholders: The nodes of parameters, buffers, inputs and, for training, the loss scale.
        results: The nodes of the outputs, then of the gradients.
        names: Name by node.
        aliases: Node by name, for tensors that have that name only if it is requested.
        by_name: Node by name, of both kinds.
    """

    def __init__(
        self,
        traced: TraceResult,
        names: dict[torch.fx.Node, str],
        aliases: dict[str, torch.fx.Node],
    ) -> None:
        self.traced = traced
        self.nodes: list[torch.fx.Node] = list(traced.graph_module.graph.nodes)
        self.placeholders = [node for node in self.nodes if node.op == "placeholder"]
        self.results: list[Any] = list(self.nodes[-1].args[0])  # type: ignore[arg-type]
        self.names = names
        self.aliases = aliases
        self.by_name = aliases | {name: node for node, name in names.items()}
        controls = traced.controls
        self._owners = {
            inner: node
            for node, control in controls_in(traced.graph_module.graph, controls)
            for body in control.bodies
            for inner in body.graph.nodes
        }
        everywhere = (*self.nodes, *self._owners)
        self._prints = {self.key_of(node): node for node in everywhere if node.target is PRINT}

    @staticmethod
    def key_of(node: torch.fx.Node) -> int:
        """Return the key of a mark or a print."""
        key: Any = node.args[1]
        return int(key)

    @property
    def first_input(self) -> int:
        """Index of the first input among the placeholders."""
        return len(self.traced.parameters) + len(self.traced.buffers)

    def outputs(self) -> list[Any]:
        """Return the nodes of the model's outputs."""
        return self.results[: self.traced.num_outputs]

    def gradients(self) -> dict[str, Any]:
        """Return the node of each parameter's gradient, by the parameter's name."""
        nodes = self.results[self.traced.num_outputs :]
        return dict(zip(self.traced.gradients, nodes, strict=True))

    def attribute(self, node: torch.fx.Node) -> torch.Tensor:
        """Return the data of a ``get_attr`` node: a tensor made from Python numbers."""
        data: torch.Tensor = getattr(self.traced.graph_module, str(node.target))
        return data

    def message_name(self, node: torch.fx.Node) -> str:
        """Return the name of a node for messages: its own, or that of a node that reads it."""
        if node in self.names:
            return self.names[node]
        return next((self.names[user] for user in node.users if user in self.names), node.name)

    def printed_name(self, node: torch.fx.Node) -> str:
        """Return the name of a printed tensor; for a gradient, the name of its forward tensor."""
        request = self.traced.prints[self.key_of(node)]
        if request.gradient_of is not None:
            return self.printed_name(self._prints[request.gradient_of])
        source: Any = node.args[0]
        name: str = self.names.get(source, source.name)
        return name

    def lasting_changes(self) -> list[torch.fx.Node]:
        """Return the nodes that give a placeholder a new value that is kept after the micro-batch.

        Changes of inputs, parameters, floating-point buffers and counters are kept; other integer
        buffers are constants of the program.
        """
        return [node for node in self.nodes if is_mutating(node) and self._lasts(node)]

    def lost_changes(self) -> set[torch.fx.Node]:
        """Return the placeholders of constants that forward changes: each run begins anew."""
        lost = [node for node in self.nodes if is_mutating(node) and not self._lasts(node)]
        return {node.all_input_nodes[0] for node in lost}

    def _lasts(self, write: torch.fx.Node) -> bool:
        target: Any = write.args[0]
        is_input = self.placeholders.index(target) >= self.first_input
        return is_input or not self.traced.is_constant(self.names[target])

    def streams(self, is_random: Callable[[torch.fx.Node], bool]) -> dict[torch.fx.Node, int]:
        """Return a number for each node that draws random numbers; equal for copies of a node.

        Args:
            is_random: Returns whether a node draws random numbers.
        """
        numbers: dict[object, int] = {}
        found = filter(is_random, with_bodies(self.nodes, self.traced.controls))
        return {node: numbers.setdefault(draw_of(node), len(numbers)) for node in found}

    def needed(self, wanted: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
        """Return the nodes that results, lasting changes, checks and ``wanted`` depend on."""
        todo = [node for node in self.results if isinstance(node, torch.fx.Node)]
        todo += self.lasting_changes()
        todo += (node for node in self.nodes if is_check(node, self.traced.controls))
        todo += wanted
        found: set[torch.fx.Node] = set()
        while todo:
            node = todo.pop()
            while node in self._owners:
                node = self._owners[node]
            if node not in found:
                found.add(node)
                todo.extend(node.all_input_nodes)
        return found


def name_nodes(traced: TraceResult, loss_scale: str | None) -> NamedGraph:
    """Give every result of a trace its name.

    Args:
        traced: The trace, without mutation.
        loss_scale: Name of the loss scale's placeholder; None for inference.

    Raises:
        Error: A parameter or buffer has the name of a tensor in the training graph.
    """
    _check_not_reserved([*traced.parameters, *traced.buffers])
    graph = traced.graph_module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    given = [*traced.parameters, *traced.buffers, *spelling.inputs(traced.num_inputs)]
    if loss_scale is not None:
        given.append(loss_scale)
    table = NameTable()
    for name, node in zip(given, placeholders, strict=True):
        table.set(node, name)
    table.name_forward(graph, traced.controls)
    aliases = {
        spelling.partial_gradient(*key): node for key, node in traced.partial_gradients.items()
    }
    losses = {node: table.loss_name(node) for node in traced.losses}
    aliases |= {name: node for node, name in losses.items() if name != table.of_node.get(node)}
    for node in graph.nodes:
        if node.target is MARK:
            key = NamedGraph.key_of(node)
            marked = _marked_name(traced, table, key)
            if marked is not None:
                table.set(node, spelling.gradient(marked))
            forward = traced.forward_of.get(key)
            loss = None if forward is None else losses.get(forward)
            if loss is not None and loss != marked:
                aliases[spelling.gradient(loss)] = node
    _name_gradients_in_bodies(traced, table)
    return NamedGraph(traced, table.of_node, aliases)


def _name_gradients_in_bodies(traced: TraceResult, table: NameTable) -> None:
    """Name the gradients of values in bodies: those that bodies of gradients mark."""
    bodies = [
        body
        for _, control in controls_in(traced.graph_module.graph, traced.controls)
        for body in control.bodies
    ]
    nodes = list(dict.fromkeys(node for body in bodies for node in body.graph.nodes))
    # If one call has become several nodes, the last one has its result.
    names = {gradient_key_of(node): table.of_node[node] for node in nodes if node in table.of_node}
    for node in nodes:
        if node.target is MARK and NamedGraph.key_of(node) in names:
            table.set(node, spelling.gradient(names[NamedGraph.key_of(node)]))


def _check_not_reserved(given: Iterable[str]) -> None:
    for name in given:
        if spelling.is_reserved(name):
            raise Error(
                f"The parameter or buffer '{name}' has the name of a tensor of the training graph "
                "(its prefix, with three underscores, is reserved). Rename it."
            )


def _marked_name(traced: TraceResult, table: NameTable, key: int) -> str | None:
    """Return the name of the tensor whose gradient a mark shows; None if it has none."""
    if key in traced.parameter_of:
        return traced.parameter_of[key]
    return table.of_node.get(traced.forward_of[key])
