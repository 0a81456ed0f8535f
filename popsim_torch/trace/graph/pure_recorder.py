"""Records operators without mutation as a graph, like ``make_fx``, but much faster.

The operators run on tensors of the device ``meta``, whose shapes are computed in C++. Fake tensors,
several times slower, are used for the rest: a device, or shape rules that exist only for them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg

from popsim_torch.errors import InternalError
from popsim_torch.private_torch.fake import FAKE_RULES, FakeTensor, FakeTensorMode
from popsim_torch.private_torch.graph_modules import make_graph_module
from popsim_torch.private_torch.modes import TorchDispatchMode, disable_current_modes
from popsim_torch.private_torch.operators import (
    OpOverload,
    has_composite_kernel,
    has_meta_kernel,
    schema_of,
)
from popsim_torch.private_torch.proxies import add_call
from popsim_torch.private_torch.trees import tree_map_only
from popsim_torch.trace.graph.origin import copy_channel

__all__ = ["PureRecorder", "is_composite", "node_of"]

aten = torch.ops.aten
# Operators whose last arguments are positions; the shape does not depend on them.
_COUNTING = {
    aten.select_copy.int: 2,
    aten.select_scatter.default: 2,
    aten.select_backward.default: 3,
    aten.slice_scatter.default: 2,
    aten.slice_backward.default: 2,
}


class PureRecorder(TorchDispatchMode):
    """The mode that records operators while it is active.

    Nodes have their value in ``meta["val"]``. Nodes with the same shape and layout share one fake
    tensor, so code must not use its memory.

    Args:
        fake_mode: The mode of the values.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self.graph = torch.fx.Graph()
        self._fake_mode = fake_mode
        self._attributes: dict[str, torch.Tensor] = {}
        # Keys: layout, device and dtype; or operator and arguments.
        self._values: dict[Any, FakeTensor] = {}
        self._results: dict[Any, Any] = {}

    def placeholder(self, name: str, value: FakeTensor) -> torch.Tensor:
        """Add an input with a value; return the tensor to pass to operators."""
        return _flowing(self.input(name, value))

    def input(self, name: str, value: FakeTensor) -> torch.fx.Node:
        """Add an input with a value; return its node."""
        return self._with_value(self.graph.placeholder(name), self.shared(value))

    def attribute(self, value: torch.Tensor) -> torch.Tensor:
        """Add data of the host; return the tensor to pass to operators."""
        return _flowing(self.data(value))

    def data(self, value: torch.Tensor) -> torch.fx.Node:
        """Add data of the host; return its node."""
        name = f"_tensor_constant{len(self._attributes)}"
        self._attributes[name] = value
        fake = self._value(value, value.device)
        # (torch.fx.Graph.get_attr would look for it in a module, and warn.)
        return self._with_value(self.graph.create_node("get_attr", name), fake)

    def finish(self, results: Any) -> torch.fx.GraphModule:
        """Return the graph that computes the given results: nodes, or tensors of operators."""
        output = self.graph.output(tree_map_only(torch.Tensor, node_of, results))
        output.meta |= copy_channel()
        return make_graph_module(self._attributes, self.graph)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record one operator."""
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args)
        if func.namespace == "profiler":  # time markers, for example of loaders: nothing to compute
            return func(*args, **kwargs)
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func is aten.lift_fresh.default:
            func = aten.lift_fresh_copy.default  # later nodes may change its result in place
        node_args, node_kwargs = tree_map_only(torch.Tensor, node_of, (args, kwargs))
        return tree_map_only(
            torch.fx.Node, _flowing, self.record(func, tuple(node_args), node_kwargs)
        )

    def record(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: Callable[[], Any] | None = None,
    ) -> Any:
        """Add the node of an operator.

        Args:
            func: The operator.
            args: Its arguments, with nodes in the place of tensors.
            kwargs: Its keyword arguments.
            known: Returns fake tensors like the results, or None if that is not known.

        Returns:
            The node, or nodes if the operator has several results.
        """
        node = add_call(self.graph, func, args, kwargs)
        if schema_of(func).is_mutable:  # the final new value of an input
            return self._with_value(node, args[0].meta["val"])
        how = _how(func)
        key = (func, *map(_key, args[: how.num_counting]), *map(_key, kwargs.items()))
        if key not in self._results:
            values = None if known is None else known()
            if values is None:
                values = self._computed(how, node)
            self._results[key] = tree_map_only(torch.Tensor, self.shared, values)
        return self._noted(node, self._results[key])

    def _computed(self, how: _How, node: torch.fx.Node) -> Any:
        """Return the values of a node's results."""
        target: Any = node.target
        devices = {one.meta["val"].fake_device for one in node.all_input_nodes}
        if how.is_short and len(devices) == 1 and not node.kwargs:
            (device,) = devices
            with disable_current_modes():
                found = target(*map_arg(node.args, lambda one: _empty_like(one.meta["val"])))
            return self._value(found, device)
        fakes: Any = map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
        with disable_current_modes(), self._fake_mode:
            return target(*fakes[0], **fakes[1])

    def _value(self, like: torch.Tensor, device: torch.device) -> FakeTensor:
        """Return the shared fake tensor of a device that is like another tensor."""
        key = (like.shape, like.stride(), like.storage_offset(), like.dtype, device)
        if key not in self._values:
            self._values[key] = FakeTensor(self._fake_mode, _empty_like(like), device)
        return self._values[key]

    def shared(self, fake: FakeTensor) -> FakeTensor:
        """Return the fake tensor that the nodes with such a value share."""
        return self._value(fake, fake.fake_device)

    def _noted(self, node: torch.fx.Node, values: Any) -> Any:
        """Record the value of a node, or a new node for each of several; return the nodes."""
        if isinstance(values, torch.Tensor):
            return self._with_value(node, values)
        self._with_value(node, values)
        if not isinstance(values, (list, tuple)):  # nothing, or a fact about shapes
            return values
        parts = (add_call(self.graph, operator.getitem, (node, i), {}) for i in range(len(values)))
        return type(values)(map(self._noted, parts, values))

    def _with_value(self, node: torch.fx.Node, value: Any) -> torch.fx.Node:
        node.meta |= copy_channel() | {"val": value}
        return node


def _flowing(node: torch.fx.Node) -> torch.Tensor:
    """Return the tensor to pass to operators for a node."""
    flowing: Any = _empty_like(node.meta["val"])
    flowing.popsim_node = node
    return flowing  # type: ignore[no-any-return]


def is_composite(func: OpOverload) -> bool:
    """Return whether an operator is recorded as the operators that it consists of."""
    return _how(func).is_composite


def _empty_like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _key(argument: Any) -> Any:
    """Return a key that is equal for all arguments with which the results have the same shape."""
    if isinstance(argument, torch.fx.Node):
        return id(argument.meta["val"])
    if isinstance(argument, (list, tuple)):
        return tuple(map(_key, argument))
    return type(argument), argument  # True, 1 and 1.0 are equal, but their types differ


def node_of(flowing: Any) -> torch.fx.Node:
    """Return the node that computes a tensor during the recording."""
    node: torch.fx.Node | None = getattr(flowing, "popsim_node", None)
    if node is None:
        raise InternalError("functionalise: a value has no node in the new graph")
    return node


@dataclass(frozen=True)
class _How:
    """The way in which the results of an operator are computed.

    Attributes:
        is_composite: Run the operators that it consists of.
        is_short: Ask a kernel in C++ for the shape only.
        num_counting: Number of leading arguments on which their shape depends.
    """

    is_composite: bool
    is_short: bool
    num_counting: int | None


@functools.cache
def _how(func: OpOverload) -> _How:
    name = func.name()  # type: ignore[no-untyped-call]
    return _How(
        is_composite=has_composite_kernel(name),
        is_short=name.startswith("aten::")
        and len(schema_of(func).returns) == 1
        and str(schema_of(func).returns[0].type) == "Tensor"
        and has_meta_kernel(name, func)
        and func not in FAKE_RULES,
        num_counting=_COUNTING.get(func),
    )
