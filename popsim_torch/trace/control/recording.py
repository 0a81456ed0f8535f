"""Records functions of loops and branches: once, together with their gradients.

A function is called with new tensors, its nodes are cut out of the graph, and one node calls the
result. If gradients are wanted, the gradients of its results are also new tensors, and the
gradients that follow from them are further results.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

from popsim_torch.dtypes import is_continuous
from popsim_torch.errors import Error, InternalError
from popsim_torch.private_torch.modes import DisableTorchFunction
from popsim_torch.private_torch.proxies import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    last_node,
    track_tensor_tree,
)
from popsim_torch.trace.books.call_origins import CallOrigins
from popsim_torch.trace.books.gradients import Gradients
from popsim_torch.trace.books.known_values import KnownValues
from popsim_torch.trace.control.captures import BodyScopes, StandIn
from popsim_torch.trace.control.cut import Cut, Recorded, check_not_outside, cut
from popsim_torch.trace.graph.bodies import CONTROL, Control, empty_results
from popsim_torch.trace.graph.device_types import seen_dtype
from popsim_torch.trace.graph.kept_shapes import check_shapes_outside, shapes_kept
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.trace.graph.traced_tensors import (
    current_graph,
    host_computation,
    in_transform,
    node_of,
)

__all__ = [
    "Body",
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


@dataclass(frozen=True)
class Body:
    """A function that has been recorded and cut out.

    Attributes:
        cut: The nodes; its results, then the gradients of ``inputs``, then those of ``sources``.
        num_results: Number of results.
        seeds: Index, among its inputs, of the gradient of each result; None if it has no gradient.
        inputs: Indices of the inputs that have a gradient.
        sources: The tensors from outside that have a gradient: node and tensor.
    """

    cut: Cut
    num_results: int
    seeds: Sequence[int | None] = ()
    inputs: Sequence[int] = ()
    sources: Sequence[tuple[torch.fx.Node, torch.Tensor]] = ()

    @property
    def results(self) -> list[torch.fx.Node]:
        """Return the nodes of its results."""
        return [node for node in self.cut.results[: self.num_results] if node is not None]

    def gradients(self) -> dict[int, torch.fx.Node | None]:
        """Return the gradient of each input that has one, by position."""
        found = self.cut.results[self.num_results : self.num_results + len(self.inputs)]
        return dict(zip(self.inputs, found, strict=True))

    def source_gradients(self) -> dict[torch.fx.Node, torch.fx.Node]:
        """Return the gradient of each node from outside that it reads and that has one."""
        found = self.cut.results[self.num_results + len(self.inputs) :]
        pairs = zip(self.sources, found, strict=True)
        return {source: gradient for (source, _), gradient in pairs if gradient is not None}

    def differentiated(self) -> dict[torch.fx.Node, torch.Tensor]:
        """Return the nodes and tensors from outside that have a gradient."""
        gradients = self.source_gradients()
        return {node: tensor for node, tensor in self.sources if node in gradients}

    def changed(self) -> dict[torch.fx.Node, torch.fx.Node]:
        """Return the new value of each captured node that it changes in place."""
        return {self.cut.captures[i]: value for i, value in self.cut.changed.items()}

    def placeholders(self) -> dict[torch.fx.Node, torch.fx.Node]:
        """Return the node in the body for each captured node."""
        return {node: self.cut.capture(i) for i, node in enumerate(self.cut.captures)}


class BodyRecorder:
    """Records the functions of one trace, and adds the nodes that call them.

    Args:
        controls: Receives the loops and branches.
        origins: Knows the origin of the recorded nodes.
        gradients: Follows the gradients of forward.
        values: Knows values while forward runs.
        scopes: Knows the replacements of tensors in bodies.

    Attributes:
        controls: See above.
        origins: See above.
        gradients: See above.
        scopes: See above.
    """

    def __init__(
        self,
        controls: list[Control],
        origins: CallOrigins,
        gradients: Gradients,
        values: KnownValues,
        scopes: BodyScopes,
    ) -> None:
        self.controls = controls
        self.origins = origins
        self.gradients = gradients
        self.scopes = scopes
        self._values = values
        self._draws = itertools.count()
        self._gone: set[torch.fx.Node] = set()

    def condition(self, name: str, value: Any) -> torch.Tensor:
        """Return the traced tensor of a boolean.

        Raises:
            Error: It is not a boolean tensor with one element.
        """
        if isinstance(value, bool):
            with DisableTorchFunction(), host_computation():
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
        return self.scopes.traced(value)

    def record(
        self,
        name: str,
        function: Callable[..., Any],
        values: Tensors,
        like: Tensors,
        carries: bool = True,
    ) -> Body:
        """Call a function with new tensors, and cut the recorded nodes out of the graph.

        Args:
            name: The name of the function in messages.
            function: The function; it takes and returns tensors.
            values: It is called with tensors like these.
            like: If forward sees a result and one of these as integers of the same type, the result
                gets the width that this one has on the device.
            carries: Whether its results are its next arguments; then these may have gradients even
                if ``values`` have none.

        Raises:
            Error: It does not return tensors.
        """
        graph = current_graph()
        if graph is None:
            raise InternalError("control_flow: a body is recorded outside of a trace")
        if in_transform():
            raise Error(
                f"{name}{user_line(' at ')} is called by a function that torch.func (vmap, grad, "
                "jvp) transforms, which is not supported. Put the transform into the body, or "
                "write a Python loop or torch.where(condition, a, b)."
            )
        last = last_node(graph)
        differentiates = torch.is_grad_enabled()
        with (
            self.gradients.inside_of_body(),
            self.scopes.capturing(last, differentiates) as captures,
        ):
            given = [_own(value, differentiates, carries) for value in values]
            own = [stand_in.node for stand_in in given]
            tensors = {f"argument {i}": stand_in.tensor for i, stand_in in enumerate(given)}
            with shapes_kept(tensors):
                called = function(*tensors.values())
            check_shapes_outside(last)
            results = [self.scopes.traced(result) for result in tensors_of(name, called)]
            results = _as_wide(results, like)
            nodes: list[torch.fx.Node | None] = [node_of(result) for result in results]
            inputs = [i for i, stand_in in enumerate(given) if stand_in.leaf.requires_grad]
            sources = captures.differentiable()
            wanted = [given[i].leaf for i in inputs] + [source.leaf for _, source in sources]
            with self.gradients.gradient_of_body():
                seeds, gradients = _differentiate(results, wanted) if differentiates else ((), ())
        places: list[int | None] = []
        for seed in seeds:
            places.append(None if seed is None else len(own))
            if seed is not None:
                own.append(seed.node)
        nodes += [None if gradient is None else node_of(gradient) for gradient in gradients]
        body, gone = cut(graph, Recorded(last, own, nodes), self._draws, self.controls)
        self._gone |= gone
        self._values.forget(gone, last)
        read = [(source.node, tensor) for tensor, source in sources]
        return Body(body, len(results), places, inputs, read)

    def check(self, outputs: Sequence[torch.Tensor]) -> None:
        """Check that no tensor from a body is used outside of the body.

        Raises:
            Error: A tensor is used outside.
        """
        graph = current_graph()
        if self._gone and graph is not None:
            check_not_outside(graph, [node_of(output) for output in outputs], self._gone)

    def call(self, control: Control, inputs: Sequence[torch.fx.Node]) -> list[torch.Tensor]:
        """Add the node that runs a control, and return its results."""
        self.controls.append(control)
        arguments = (list(inputs), len(self.controls) - 1)
        results: list[torch.Tensor] = _add_node(CONTROL, arguments, lambda: empty_results(control))
        return results


def _add_node(target: Any, args: tuple[Any, ...], make_results: Callable[[], Any]) -> Any:
    """Add a node to the recorded graph, and return tensors for its results."""
    mode: Any = get_proxy_mode()
    tracer = mode.tracer
    Proxy: Any = torch.fx.Proxy
    proxies = map_aggregate(
        args, lambda value: Proxy(value, tracer) if isinstance(value, torch.fx.Node) else value
    )
    with DisableTorchFunction():
        proxy = tracer.create_proxy("call_function", target, proxies, {})
        with disable_proxy_modes_tracing():
            results = make_results()
            track_tensor_tree(results, proxy, constant=None, tracer=tracer)
    return results


def add_copy(node: torch.fx.Node) -> torch.fx.Node:
    """Add a node that keeps the present value of another one; it costs nothing."""
    copy: torch.Tensor = _add_node(
        _COPY, (node,), functools.partial(torch.empty_like, value_of(node))
    )
    return node_of(copy)


def _own(value: torch.Tensor, differentiates: bool, carries: bool) -> StandIn:
    """Return the replacement of an input while a body is recorded."""
    with DisableTorchFunction(), torch.no_grad():
        own: torch.Tensor = torch.ops.popsim.body_input(value)
    differentiable = value.requires_grad or (carries and is_continuous(value.dtype))
    return StandIn(node_of(own), own, differentiates and differentiable)


def _as_wide(results: Tensors, like: Tensors) -> list[torch.Tensor]:
    """Convert integer results of a body to the width that other tensors have on the device.

    Forward sees 32-bit and 64-bit integers as one type. Results without a counterpart do not
    change.
    """
    with DisableTorchFunction():
        return [
            result.to(other.dtype)
            if other is not None and seen_dtype(result.dtype) == seen_dtype(other.dtype)
            else result
            for result, other in itertools.zip_longest(results, like[: len(results)])
        ]


def _differentiate(
    results: Tensors, wanted: Tensors
) -> tuple[Sequence[StandIn | None], Sequence[torch.Tensor | None]]:
    """Return tensors for the gradients of results, and the gradients that follow."""
    if not wanted or not any(result.requires_grad for result in results):
        return [None] * len(results), [None] * len(wanted)
    seeds = [_own(result, False, False) if result.requires_grad else None for result in results]
    pairs = [(r, s.tensor) for r, s in zip(results, seeds, strict=True) if s is not None]
    with DisableTorchFunction():
        gradients = torch.autograd.grad(
            [result for result, _ in pairs],
            list(wanted),
            [seed for _, seed in pairs],
            allow_unused=True,
        )
    return seeds, gradients


def as_list(value: Any) -> list[Any]:
    """Return several values as a list, or one value as a list of one."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def number(value: Any) -> Any:
    """Return a Python number as a tensor."""
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    with DisableTorchFunction(), host_computation():
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
        f"it returned a {type(wrong).__name__}."
    )


def value_of(node: torch.fx.Node) -> torch.Tensor:
    """Return a tensor with the shape and dtype of a node's result."""
    value: torch.Tensor = node.meta["val"]
    return value
