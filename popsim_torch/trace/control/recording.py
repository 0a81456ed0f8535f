"""Records functions that are repeated or chosen: once, together with their gradients.

A function is called with tensors of its own, its nodes are cut out of the graph, and a call of it
is one node. Where gradients are wanted, the gradients of its results are tensors of its own, too,
and the gradients that follow from them are further results.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.fx
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor_tree,
)
from torch.fx.node import map_aggregate

from popsim_torch.errors import Error, InternalError
from popsim_torch.trace.control.bodies import CONTROL, INPUT, Control, empty_results
from popsim_torch.trace.control.cut import Cut, Recorded, check_not_outside, cut, nodes_behind
from popsim_torch.trace.origin import user_line
from popsim_torch.trace.traced_tensors import (
    current_graph,
    host_computation,
    is_host_tensor,
    node_of,
)

__all__ = [
    "Body",
    "BodyListener",
    "BodyRecorder",
    "Tensors",
    "add_copy",
    "as_list",
    "number",
    "tensors_of",
    "value_of",
]

_COPY = torch.ops.aten.lift_fresh_copy.default

Tensors = Sequence[torch.Tensor]


class BodyListener(Protocol):
    """What the tracer does around a function that is repeated or chosen."""

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a traced tensor for the data of a host tensor."""

    def known(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the traced tensor for a parameter or buffer of the model, else ``tensor``."""

    def inside_of_body(self) -> AbstractContextManager[None]:
        """Take note of no losses and gradients in this scope: they are not the model's."""

    def forget(self, gone: set[torch.fx.Node], last: torch.fx.Node) -> None:
        """Forget nodes that were taken out of the graph; ``last`` stood in front of them."""

    def begin_call(self, op_type: str) -> None:
        """Take note that the nodes made next are the user's call of an op of this type."""

    def tensor_of(self, node: torch.fx.Node) -> torch.Tensor | None:
        """Return the differentiable tensor that a node stands for, if there is one."""

    def state_of(self, node: torch.fx.Node) -> torch.Tensor | None:
        """Return the parameter or buffer that a node stands for, if it does."""

    def after_call(self, result: torch.Tensor) -> None:
        """Take note of a differentiable result."""


@dataclass(frozen=True)
class Body:
    """A function that has been recorded and cut out.

    Attributes:
        cut: Its results, then the gradients of ``inputs``, then those of ``sources``.
        num_results: How many results it has.
        seeds: Position, among what it is given, of the gradient of each result; None: it has none.
        inputs: Positions of the inputs that have a gradient.
        sources: The captured nodes that have a gradient.
    """

    cut: Cut
    num_results: int
    seeds: Sequence[int | None] = ()
    inputs: Sequence[int] = ()
    sources: Sequence[torch.fx.Node] = ()

    @property
    def results(self) -> list[torch.fx.Node]:
        """Return the nodes of its results."""
        return [node for node in self.cut.results[: self.num_results] if node is not None]

    def gradients(self) -> dict[int, torch.fx.Node | None]:
        """Return the gradient of each input that has one, by position."""
        found = self.cut.results[self.num_results : self.num_results + len(self.inputs)]
        return dict(zip(self.inputs, found, strict=True))

    def source_gradients(self) -> dict[torch.fx.Node, torch.fx.Node]:
        """Return the gradient of each captured node that has one."""
        found = self.cut.results[self.num_results + len(self.inputs) :]
        pairs = zip(self.sources, found, strict=True)
        return {source: gradient for source, gradient in pairs if gradient is not None}

    def changed(self) -> dict[torch.fx.Node, torch.fx.Node]:
        """Return the new value of each captured node that it changes in place."""
        return {self.cut.captures[i]: value for i, value in self.cut.changed.items()}

    def placeholders(self) -> dict[torch.fx.Node, torch.fx.Node]:
        """Return what stands in it for each captured node."""
        return {node: self.cut.capture(i) for i, node in enumerate(self.cut.captures)}


class BodyRecorder:
    """Records the functions of one trace, and adds the nodes that call them.

    Args:
        listener: The tracer.
        controls: Filled with what is repeated or chosen.

    Attributes:
        listener: As given.
    """

    def __init__(self, listener: BodyListener, controls: list[Control]) -> None:
        self.listener = listener
        self._controls = controls
        self._draws = itertools.count()
        self._gone: set[torch.fx.Node] = set()

    def traced(self, value: torch.Tensor) -> torch.Tensor:
        """Return the traced tensor for one of the host, and any other one as it is."""
        value = self.listener.known(value)
        return self.listener.constant(value) if is_host_tensor(value) else value

    def condition(self, name: str, value: Any) -> torch.Tensor:
        """Return the traced tensor of a truth value.

        Raises:
            Error: It is something else.
        """
        if isinstance(value, bool):
            with torch._C.DisableTorchFunction(), host_computation():
                value = torch.tensor(value)
        if not isinstance(value, torch.Tensor) or value.dtype != torch.bool or value.numel() != 1:
            shown = (
                f"{value.dtype} of shape {tuple(value.shape)}"
                if isinstance(value, torch.Tensor)
                else type(value).__name__
            )
            raise Error(
                f"{name}{user_line(' at ')}: the condition must be a bool tensor with one element, "
                f"got {shown}. Compare or reduce: (x > 0).any()."
            )
        return self.traced(value)

    def record(self, name: str, function: Callable[..., Any], values: Tensors) -> Body:
        """Call a function on tensors of its own, and take what it records out of the graph.

        Args:
            name: What messages call it.
            function: Takes and returns tensors.
            values: It is called with tensors like these.

        Raises:
            Error: It returns something else than tensors.
        """
        graph = current_graph()
        if graph is None:
            raise InternalError("control_flow: a body is recorded outside of a trace")
        last = graph._root.prev
        differentiates = torch.is_grad_enabled()
        with self.listener.inside_of_body():
            given = [_own(value, differentiates) for value in values]
            own = [node_of(tensor) for tensor in given]
            results = [self.traced(result) for result in tensors_of(name, function(*given))]
            nodes: list[torch.fx.Node | None] = [node_of(result) for result in results]
            inputs: list[int] = []
            sources: list[tuple[torch.fx.Node, torch.Tensor]] = []
            seeds: Sequence[torch.Tensor | None] = ()
            gradients: Sequence[torch.Tensor | None] = ()
            if differentiates:
                inputs = [i for i, tensor in enumerate(given) if tensor.requires_grad]
                sources = self._sources(last, nodes)
                wanted = [given[i] for i in inputs] + [tensor for _, tensor in sources]
                seeds, gradients = _differentiate(results, wanted)
        places: list[int | None] = []
        for seed in seeds:
            places.append(None if seed is None else len(own))
            if seed is not None:
                own.append(node_of(seed))
        nodes += [None if gradient is None else node_of(gradient) for gradient in gradients]
        body, gone = cut(graph, Recorded(last, own, nodes), self._draws, self._controls)
        self._gone |= gone
        self.listener.forget(gone, last)
        return Body(body, len(results), places, inputs, [node for node, _ in sources])

    def _sources(
        self, last: torch.fx.Node, results: Sequence[torch.fx.Node | None]
    ) -> list[tuple[torch.fx.Node, torch.Tensor]]:
        """Return what differentiable tensors from outside the nodes behind one, or results, are."""
        inside = nodes_behind(last)
        read = dict.fromkeys(
            source for node in inside if node.target is not INPUT for source in node.all_input_nodes
        )
        outside = [*read, *(node for node in results if node is not None)]
        found: dict[torch.fx.Node, torch.Tensor] = {}
        for source in dict.fromkeys(outside):
            tensor = None if source in inside else self.listener.tensor_of(source)
            if tensor is not None and tensor.requires_grad:
                found[source] = tensor
        return list(found.items())

    def check(self, outputs: Sequence[torch.Tensor]) -> None:
        """Check that nothing that was made in a body is used outside of it.

        Raises:
            Error: It is.
        """
        graph = current_graph()
        if self._gone and graph is not None:
            check_not_outside(graph, [node_of(output) for output in outputs], self._gone)

    def call(self, control: Control, inputs: Sequence[torch.fx.Node]) -> list[torch.Tensor]:
        """Add the node that runs a control, and return its results."""
        self._controls.append(control)
        arguments = (list(inputs), len(self._controls) - 1)
        results: list[torch.Tensor] = _add_node(CONTROL, arguments, lambda: empty_results(control))
        return results


def _add_node(target: Any, args: tuple[Any, ...], make_results: Callable[[], Any]) -> Any:
    """Add a node to the graph that is recorded, and return what stands for its results."""
    mode: Any = get_proxy_mode()
    tracer = mode.tracer
    Proxy: Any = torch.fx.Proxy
    proxies = map_aggregate(
        args, lambda value: Proxy(value, tracer) if isinstance(value, torch.fx.Node) else value
    )
    proxy = tracer.create_proxy("call_function", target, proxies, {})
    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
        results = make_results()
        track_tensor_tree(results, proxy, constant=None, tracer=tracer)
    return results


def add_copy(node: torch.fx.Node) -> torch.fx.Node:
    """Add a node that keeps what another one computes now; it costs nothing."""
    copy: torch.Tensor = _add_node(
        _COPY, (node,), functools.partial(torch.empty_like, value_of(node))
    )
    return node_of(copy)


def _own(value: torch.Tensor, differentiates: bool) -> torch.Tensor:
    """Return what stands for an input while a body is recorded."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        own: torch.Tensor = torch.ops.popsim.body_input(value)
        return own.requires_grad_(differentiates and own.dtype.is_floating_point)


def _differentiate(
    results: Tensors, wanted: Tensors
) -> tuple[list[torch.Tensor | None], Sequence[torch.Tensor | None]]:
    """Return tensors that stand for gradients of results, and the gradients that follow."""
    if not wanted or not any(result.requires_grad for result in results):
        return [None] * len(results), [None] * len(wanted)
    with torch._C.DisableTorchFunction():
        seeds = [_own(result, False) if result.requires_grad else None for result in results]
        pairs = [(r, s) for r, s in zip(results, seeds, strict=True) if s is not None]
        gradients = torch.autograd.grad(
            [result for result, _ in pairs],
            list(wanted),
            [seed for _, seed in pairs],
            allow_unused=True,
        )
    return seeds, gradients


def as_list(value: Any) -> list[Any]:
    """Return several values as a list, one as a list of one."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def number(value: Any) -> Any:
    """Return a Python number as a tensor."""
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    with torch._C.DisableTorchFunction(), host_computation():
        return torch.tensor(value)


def tensors_of(name: str, value: Any) -> list[torch.Tensor]:
    """Return the results of a body as a list."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)) and all(isinstance(item, torch.Tensor) for item in value):
        return list(value)
    items = value if isinstance(value, (list, tuple)) else [value]
    wrong = next(item for item in items if not isinstance(item, torch.Tensor))
    raise Error(
        f"{name}{user_line(' at ')}: the body must return a tensor, or a list or tuple of tensors; "
        f"there is a {type(wrong).__name__} in what it returned."
    )


def value_of(node: torch.fx.Node) -> torch.Tensor:
    """Return a tensor of the shape and element type of what a node computes."""
    value: torch.Tensor = node.meta["val"]
    return value
