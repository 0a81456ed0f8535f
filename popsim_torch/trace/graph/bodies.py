"""Functions that a traced model repeats or chooses from: graphs of their own, called by one node.

The node is ``popsim::control(inputs, index)``, where ``index`` tells which of the trace's
``controls`` it runs. The placeholders of a body are its inputs; its results are those of the node.
No body mutates anything.
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
    """A function that is repeated.

    Its inputs are values that are carried from iteration to iteration, then tensors of which each
    iteration has one slice, then what every iteration has whole. Its results are the carried values
    for the next iteration, then slices of what stacks up over all iterations.

    Attributes:
        body: The function.
        count: How many iterations; at most so many if it is conditional.
        carried: How many values are carried.
        sliced: Of how many tensors each iteration has a slice.
        reverse: The first iteration has the last slice.
        conditional: It goes on as long as the first carried value is true.
        num_named: How many of the results have names.
        is_gradient: It computes gradients, which alone have names in it.
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
        """Return shape and element type of each result."""
        found = _types(self.body)
        stacks = [((self.count, *shape), dtype) for shape, dtype in found[self.carried :]]
        return [*found[: self.carried], *stacks]


@dataclass(frozen=True)
class Branch:
    """Two functions, one of which is called: the first where the first input is true.

    Both have all further inputs.

    Attributes:
        if_true: A function.
        if_false: Its results have the same types.
        num_named: How many of the results have names.
        is_gradient: It computes gradients, which alone have names in it.
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
        """Return shape and element type of each result."""
        return _types(self.if_true)


Control = Loop | Branch


def results_of(body: torch.fx.GraphModule) -> list[Any]:
    """Return the nodes of what a body returns."""
    (output,) = (node for node in body.graph.nodes if node.op == "output")
    return list(output.args[0])


def placeholders_of(body: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Return the nodes of what a body is given."""
    return [node for node in body.graph.nodes if node.op == "placeholder"]


def _types(body: torch.fx.GraphModule) -> list[tuple[tuple[int, ...], torch.dtype]]:
    values = [node.meta["val"] for node in results_of(body)]
    return [(tuple(value.shape), value.dtype) for value in values]


def control_of(node: torch.fx.Node, controls: Sequence[Control]) -> Control | None:
    """Return what a node repeats or chooses from; None for any other node."""
    if node.target is not CONTROL:
        return None
    index: Any = node.args[1]
    control: Control = controls[index]
    return control


def with_bodies(
    nodes: Iterable[torch.fx.Node], controls: Sequence[Control]
) -> Iterator[torch.fx.Node]:
    """Yield nodes, and after each that runs bodies the nodes of these."""
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
    """Yield the nodes of a graph, and of the bodies in it, that run a control."""
    for node in with_bodies(graph.nodes, controls):
        control = control_of(node, controls)
        if control is not None:
            yield node, control


_known: ContextVar[Sequence[Control]] = ContextVar("controls", default=())


@contextmanager
def controls_known(controls: Sequence[Control]) -> Iterator[None]:
    """Let the operator tell the shapes of its results in this scope."""
    token = _known.set(controls)
    try:
        yield
    finally:
        _known.reset(token)


def empty_results(control: Control) -> list[torch.Tensor]:
    """Return empty tensors of the device, as the results of a control are."""
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


_library = _register()  # the operators exist as long as it does

CONTROL = torch.ops.popsim.control.default
# A loop or branch may be needed though nobody reads its results: that depends on its bodies, which
# torch.fx does not see. So torch.fx removes none (``functionalise.is_check`` decides).
torch.fx.node.has_side_effect(CONTROL)
INPUT = torch.ops.popsim.body_input.default
"""Stands, while a body is recorded, for one of its inputs."""
