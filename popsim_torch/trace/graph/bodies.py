"""Functions that a traced model repeats or chooses from: separate graphs, called by one node.

The node is ``popsim::control(inputs, index)``, where ``index`` is its index in the trace's
``controls``. The placeholders of a body are its inputs; its results are those of the node. No body
mutates a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from popsim_torch.trace.graph.device import DEVICE
from popsim_torch.trace.graph.markers import NAMESPACE
from popsim_torch.typed_torch import new_library

__all__ = ["CONTROL", "INPUT", "Branch", "Control", "Loop", "control_of", "controls_known"]


@dataclass(frozen=True)
class Loop:
    """A repeated function.

    Its inputs are the carried values, then tensors of which each iteration gets one slice, then
    tensors that every iteration gets as a whole. Its results are the carried values for the next
    iteration, then slices that are stacked over all iterations.

    Attributes:
        body: The function.
        count: Number of iterations; the maximum if the loop is conditional.
        carried: Number of carried values.
        sliced: Number of tensors of which each iteration gets a slice.
        reverse: Whether the first iteration gets the last slice.
        conditional: Whether the loop ends when the first carried value is false.
        num_named: Number of results that have names.
        is_gradient: Whether it computes gradients; then only the gradients in it have names.
    """

    body: torch.fx.GraphModule
    count: int
    carried: int
    sliced: int = 0
    reverse: bool = False
    conditional: bool = False
    num_named: int = 0
    is_gradient: bool = False

    @property
    def bodies(self) -> tuple[torch.fx.GraphModule, ...]:
        """Return its functions."""
        return (self.body,)

    @property
    def types(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each result."""
        found = _types(self.body)
        stacks = [((self.count, *shape), dtype) for shape, dtype in found[self.carried :]]
        return [*found[: self.carried], *stacks]


@dataclass(frozen=True)
class Branch:
    """Two functions, one of which is called: the first one if the first input is true.

    Both get all further inputs.

    Attributes:
        if_true: The function for a true condition.
        if_false: The other function; its results have the same types.
        num_named: Number of results that have names.
        is_gradient: Whether it computes gradients; then only the gradients in it have names.
    """

    if_true: torch.fx.GraphModule
    if_false: torch.fx.GraphModule
    num_named: int = 0
    is_gradient: bool = False

    @property
    def bodies(self) -> tuple[torch.fx.GraphModule, ...]:
        """Return its functions."""
        return (self.if_true, self.if_false)

    @property
    def types(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each result."""
        return _types(self.if_true)


Control = Loop | Branch


def results_of(body: torch.fx.GraphModule) -> list[Any]:
    """Return the nodes of a body's results."""
    (output,) = (node for node in body.graph.nodes if node.op == "output")
    return list(output.args[0])


def placeholders_of(body: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Return the nodes of a body's inputs."""
    return [node for node in body.graph.nodes if node.op == "placeholder"]


def _types(body: torch.fx.GraphModule) -> list[tuple[tuple[int, ...], torch.dtype]]:
    values = [node.meta["val"] for node in results_of(body)]
    return [(tuple(value.shape), value.dtype) for value in values]


def control_of(node: torch.fx.Node, controls: Sequence[Control]) -> Control | None:
    """Return the loop or branch of a node; None for any other node."""
    if node.target is not CONTROL:
        return None
    index: Any = node.args[1]
    control: Control = controls[index]
    return control


def with_bodies(
    nodes: Iterable[torch.fx.Node], controls: Sequence[Control]
) -> Iterator[torch.fx.Node]:
    """Yield nodes, and after each node with bodies the nodes of the bodies."""
    for node in nodes:
        yield node
        control = control_of(node, controls)
        for body in () if control is None else control.bodies:
            yield from with_bodies(body.graph.nodes, controls)


def all_bodies(controls: Sequence[Control]) -> Iterator[torch.fx.GraphModule]:
    """Yield every body of a trace."""
    for control in controls:
        yield from control.bodies


def controls_in(
    graph: torch.fx.Graph, controls: Sequence[Control]
) -> Iterator[tuple[torch.fx.Node, Control]]:
    """Yield the nodes of a graph, and of its bodies, that run a loop or branch."""
    for node in with_bodies(graph.nodes, controls):
        control = control_of(node, controls)
        if control is not None:
            yield node, control


_known: ContextVar[Sequence[Control]] = ContextVar("controls", default=())


@contextmanager
def controls_known(controls: Sequence[Control]) -> Iterator[None]:
    """Let the operator compute the shapes of its results in this scope."""
    token = _known.set(controls)
    try:
        yield
    finally:
        _known.reset(token)


def empty_results(control: Control) -> list[torch.Tensor]:
    """Return empty tensors of the device for the results of a loop or branch."""
    return [torch.empty(shape, dtype=dtype, device=DEVICE) for shape, dtype in control.types]


_SCHEMAS: Mapping[str, str] = {
    "control": "control(Tensor[] inputs, int index) -> Tensor[]",
    "body_input": "body_input(Tensor x) -> Tensor",
}


def _register() -> Any:
    library = new_library(NAMESPACE, "FRAGMENT")
    rules: dict[str, Any] = {
        "control": lambda inputs, index: empty_results(_known.get()[index]),
        "body_input": lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    }
    for name, schema in _SCHEMAS.items():
        library.define(schema)
        torch.library.register_fake(f"{NAMESPACE}::{name}", rules[name], lib=library)
    return library


_library = _register()  # the operators exist as long as this object

CONTROL = torch.ops.popsim.control.default
# A loop or branch may be needed even if nothing reads its results: this depends on its bodies,
# which torch.fx does not see. So torch.fx removes none (``functionalise.is_check`` decides).
torch.fx.node.has_side_effect(CONTROL)
INPUT = torch.ops.popsim.body_input.default
"""The operator that makes an input of a body while the body is recorded."""
