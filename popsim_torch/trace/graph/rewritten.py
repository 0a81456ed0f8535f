"""Removes mutation from a graph node by node, where the effect of every mutation is certain.

PyTorch removes mutation while it runs a graph a second time. Most graphs have only a few kinds of
mutation: running statistics, activations in place, gradients that are added up. For these this file
makes the same nodes as PyTorch, in the same order, in a small part of the time:

* An operator that changes a tensor becomes the operator that returns the new value.
* A view becomes a copy. A view whose memory has changed is copied again where it is read.

A graph with anything else (a change through a view, for example) is left to PyTorch.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.fx
import torch.fx.traceback as fx_traceback
from torch.fx.node import map_arg

from popsim_torch.private_torch.fake import FakeTensor
from popsim_torch.private_torch.operators import (
    OpOverload,
    has_functionalize_kernel,
    is_replaced_in_transforms,
    schema_of,
)
from popsim_torch.private_torch.trees import tree_map_only
from popsim_torch.trace.graph.pure_recorder import PureRecorder, is_composite

__all__ = ["Unproven", "rewrite"]

aten = torch.ops.aten

# Operators in the place of those for which PyTorch has its own rule. (``_unsafe_view`` is a view.)
_READING = {
    aten.lift_fresh_copy.default: aten.clone.default,
    aten._to_copy.default: aten._to_copy.default,
}


class Unproven(Exception):
    """The effect of a mutation is not certain enough for this file."""


@dataclass(eq=False)
class _Memory:
    """Memory that tensors share.

    Attributes:
        node: The node of its present value, in the new graph.
        changes: How often it has changed.
        is_data: Whether it is data of the host, which PyTorch does not follow.
    """

    node: torch.fx.Node
    changes: int = 0
    is_data: bool = False


@dataclass(eq=False)
class _Tensor:
    """A tensor: a view of memory.

    Attributes:
        memory: The memory.
        node: Its node in the new graph, up to date after ``changes`` changes of the memory.
        changes: See above. Like in PyTorch, a new view counts from the beginning.
        views: The copying operators that lead from the memory to the tensor, with their arguments
            behind the first; None for a part of a memory that was cut.
    """

    memory: _Memory
    node: torch.fx.Node
    changes: int = 0
    views: tuple[tuple[OpOverload, Sequence[Any], dict[str, Any]] | None, ...] = field(default=())


class _Rewriting:
    def __init__(self, recorder: PureRecorder, watched: Collection[torch.fx.Node]) -> None:
        self._recorder = recorder
        self._watched = frozenset(watched)
        self._tensors: dict[torch.fx.Node, Any] = {}
        self._inputs: list[tuple[torch.fx.Node, _Tensor]] = []
        self.became: dict[torch.fx.Node, torch.fx.Node] = {}

    def run(self, module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        for node in module.graph.nodes:
            if node.op == "placeholder":
                name = f"arg{len(self._inputs)}_1"
                made = self._recorder.input(name, node.meta["val"])
                self._tensors[node] = _Tensor(_Memory(made), made)
                self._inputs.append((made, self._tensors[node]))
            elif node.op == "output":
                return self._finished(node)
            else:
                with fx_traceback.set_current_meta(node, "rewrite"):
                    self._tensors[node] = self._rewritten(module, node)
            if node in self._watched:
                self.became[node] = self._present(self._tensors[node])
        raise Unproven("a graph without output")

    def _finished(self, output: torch.fx.Node) -> torch.fx.GraphModule:
        results = map_arg(output.args[0], lambda one: self._present(self._tensors[one]))
        for given, one in self._inputs:
            if one.memory.changes:
                self._recorder.record(aten.copy_.default, (given, one.memory.node), {})
        return self._recorder.finish(results)

    def _rewritten(self, module: torch.fx.GraphModule, node: torch.fx.Node) -> Any:
        """Add the nodes for a node of the old graph; return the tensors that are its results."""
        target: Any = node.target
        if node.op == "get_attr":
            data = self._recorder.data(getattr(module, target))
            return _Tensor(_Memory(data, is_data=True), data)
        if target is operator.getitem:
            return self._tensors[node.args[0]][node.args[1]]  # type: ignore[index]
        if not isinstance(target, OpOverload) or _is_special(target):
            raise Unproven(target)
        if target.is_view or target is aten._unsafe_view.default:
            return self._view(node, target)
        if schema_of(target).is_mutable:
            return self._change(node, target)
        if target in _READING:
            self._check_followed(self._tensors[node.args[0]], target)  # type: ignore[index]
        new = self._record(_READING.get(target, target), node)
        if isinstance(new, torch.fx.Node):
            return _Tensor(_Memory(new), new)
        return tree_map_only(torch.fx.Node, lambda one: _Tensor(_Memory(one), one), new)

    def _check_followed(self, tensor: Any, target: OpOverload) -> None:
        """Make sure that PyTorch follows the changes of a tensor."""
        if not isinstance(tensor, _Tensor) or tensor.memory.is_data:
            raise Unproven(target)

    def _record(self, target: OpOverload, node: torch.fx.Node) -> Any:
        """Add the node of an operator that reads the inputs of an old node."""
        given = (*node.args, *_missing(target, node))
        args, kwargs = map_arg((given, node.kwargs), lambda one: self._present(self._tensors[one]))

        def known() -> Any:
            return self._value_as_before(node) if target is node.target else None

        return self._recorder.record(target, args, kwargs, known)

    def _value_as_before(self, node: torch.fx.Node) -> Any:
        """Return the values of a node if its inputs are laid out as in the old graph."""
        for one in node.all_input_nodes:
            value = one.meta.get("val")
            if not isinstance(value, FakeTensor):
                return None
            if self._tensors[one].node.meta["val"] is not self._recorder.shared(value):
                return None
        return node.meta.get("val")  # a node of popsim_torch may have none

    def _view(self, node: torch.fx.Node, target: OpOverload) -> Any:
        source = self._tensors[node.args[0]]  # type: ignore[index]
        self._check_followed(source, target)
        if any(isinstance(one, torch.fx.Node) for one in _flat((*node.args[1:], node.kwargs))):
            raise Unproven(target)
        copy = _copying(target)
        arguments, keywords = node.args[1:], dict(node.kwargs)
        new = self._recorder.record(copy, (source.node, *arguments), keywords)
        if isinstance(new, torch.fx.Node):
            step = (copy, arguments, keywords)
            return _Tensor(source.memory, new, 0, (*source.views, step))
        return type(new)(_Tensor(source.memory, one, 0, (*source.views, None)) for one in new)

    def _change(self, node: torch.fx.Node, target: OpOverload) -> Any:
        functional, changed = _functional(target)
        tensors = [self._tensors[_argument(node, position)] for position in changed]
        memories = {id(one.memory) for one in tensors}
        if len(memories) < len(tensors) or any(one.views or one.memory.is_data for one in tensors):
            raise Unproven(target)
        new = self._record(functional, node)
        if len(schema_of(functional).returns) == 1:
            self._write(tensors[0], new)
            return tensors[0]
        own = len(new) - len(tensors)
        for one, value in zip(tensors, new[own:], strict=True):
            self._write(one, value)
        results = [_Tensor(_Memory(one), one) for one in new[:own]]
        return results[0] if own == 1 else tuple(results)

    def _write(self, tensor: _Tensor, new: torch.fx.Node) -> None:
        old, value = tensor.node.meta["val"], new.meta["val"]
        if (old.shape, old.dtype) != (value.shape, value.dtype):
            raise Unproven("a change of the type")
        tensor.memory.node = tensor.node = new
        tensor.memory.changes += 1
        tensor.changes = tensor.memory.changes

    def _present(self, tensor: Any) -> torch.fx.Node:
        """Return the node of the present value of a tensor."""
        if not isinstance(tensor, _Tensor):
            raise Unproven("several results as one value")
        memory = tensor.memory
        if tensor.changes != memory.changes:
            node = memory.node
            for step in tensor.views:
                if step is None:
                    raise Unproven("a part of changed memory")
                copy, arguments, keywords = step
                node = self._recorder.record(copy, (node, *arguments), keywords)
            tensor.node, tensor.changes = node, memory.changes
        return tensor.node


def rewrite(
    module: torch.fx.GraphModule, watched: Collection[torch.fx.Node], recorder: PureRecorder
) -> tuple[torch.fx.GraphModule, dict[torch.fx.Node, torch.fx.Node]]:
    """Return a graph without mutation that computes the same; dead nodes may be left in it.

    Args:
        module: A graph of ATen operators.
        watched: Nodes whose successors the caller needs.
        recorder: Makes the new graph.

    Returns:
        The new graph, and the node of it that has the value of each watched node.

    Raises:
        Unproven: The graph has a mutation whose effect is not certain.
    """
    rewriting = _Rewriting(recorder, watched)
    return rewriting.run(module), rewriting.became


def _missing(target: OpOverload, node: torch.fx.Node) -> Sequence[Any]:
    """Return values for arguments that a node leaves out, but another operator does not."""
    if target is node.target:
        return ()
    left_out = slice(len(node.args), None)
    known = schema_of(cast(OpOverload, node.target)).arguments[left_out]
    taken = schema_of(target).arguments[left_out]
    return [
        old.default_value
        for old, new in zip(known, taken, strict=False)
        if not (new.kwarg_only or new.has_default_value())
    ]


def _flat(values: Any) -> list[Any]:
    found: list[Any] = []
    map_arg(values, found.append)
    return found


def _argument(node: torch.fx.Node, position: int) -> torch.fx.Node:
    given: Any = node.args[position] if position < len(node.args) else None
    if not isinstance(given, torch.fx.Node):
        raise Unproven(node.target)
    return given


@functools.cache
def _is_special(target: OpOverload) -> bool:
    """Return whether PyTorch replaces an operator in a way that this file does not know."""
    name = target.name()  # type: ignore[no-untyped-call]
    if is_composite(target) or is_replaced_in_transforms(name) or target.namespace == "profiler":
        return True
    if target in _READING or target is aten._unsafe_view.default:
        return False
    is_usual = target.is_view or schema_of(target).is_mutable
    return has_functionalize_kernel(name) is not is_usual and target.namespace == "aten"


@functools.cache
def _copying(view: OpOverload) -> OpOverload:
    """Return the operator that copies what a view shows."""
    if view is aten._unsafe_view.default:
        return view
    copy = _counterpart(view, f"{view.overloadpacket.__name__}_copy")
    if copy is None or schema_of(copy).is_mutable:
        raise Unproven(view)
    return copy


@functools.cache
def _functional(target: OpOverload) -> tuple[OpOverload, list[int]]:
    """Return the operator without mutation, and the positions of the changed arguments.

    It returns the results of the operator, if these are new tensors, then the new values.
    """
    schema, name = schema_of(target), target.overloadpacket.__name__
    changed = [
        i
        for i, one in enumerate(schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
    ]
    in_place = name.endswith("_") and changed == [0]
    if any(schema.arguments[i].kwarg_only for i in changed) or (
        in_place and [one.alias_info is not None for one in schema.returns] != [True]
    ):
        raise Unproven(target)
    functional = _counterpart(
        target, name.removesuffix("_"), f"{name.removesuffix('_')}_functional"
    )
    if (
        functional is None
        or torch.Tag.inplace_view in target.tags
        or schema_of(functional).is_mutable
        or functional.is_view
        or is_composite(functional)
    ):
        raise Unproven(target)
    expected = 1 if in_place else len(schema.returns) + len(changed)
    returns = schema_of(functional).returns
    if len(returns) != expected or any(str(one.type) != "Tensor" for one in returns):
        raise Unproven(target)
    return functional, changed


def _counterpart(target: OpOverload, *names: str) -> OpOverload | None:
    """Return another operator, of one of the names, that takes the arguments of an operator."""
    arguments = _arguments(target)
    for name in names:
        packet: Any = getattr(getattr(torch.ops, target.namespace), name, None)
        if packet is not None and packet is not target.overloadpacket:
            for overload in packet.overloads():
                found: OpOverload = getattr(packet, overload)
                if _arguments(found) == arguments:
                    return found
    return None


def _arguments(target: OpOverload) -> list[tuple[str, str]]:
    return [(one.name, str(one.type)) for one in schema_of(target).arguments]
