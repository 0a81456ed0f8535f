"""Removes mutation from a traced graph.

Afterwards no operator changes a tensor, and views are copies (``aten.view_copy``), because a tensor
that is rebuilt after a change may have another memory layout than the recorded one. A placeholder
that forward changed in place (a buffer, an input) has one ``copy_`` of its new value at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.fx
import torch.fx.traceback as fx_traceback
from torch.func import functionalize

from popsim_torch.errors import Error
from popsim_torch.private_torch.fake import FakeTensor
from popsim_torch.private_torch.functorch import (
    functionalize_sync,
    is_functionaltensor,
    unwrap_functional_tensor,
)
from popsim_torch.private_torch.operators import OpOverload, schema_of
from popsim_torch.trace.graph.bodies import CONTROL, Control, with_bodies
from popsim_torch.trace.graph.enqueues import ENQUEUE
from popsim_torch.trace.graph.markers import REPEAT_WHILE
from popsim_torch.trace.graph.origin import is_kept, origin_of
from popsim_torch.trace.graph.parts import (
    Views,
    is_view,
    restore,
    taken_parts,
)
from popsim_torch.trace.graph.pure_recorder import PureRecorder, node_of
from popsim_torch.trace.graph.rewritten import Unproven, rewrite
from popsim_torch.trace.graph.strided_views import refer_to_memory
from popsim_torch.trace.graph.traced_tensors import host_computation
from popsim_torch.trace.graph.window_writes import write_windows_back

# Operators without results: they fail for some values, or send values to the host.
_CHECKS = frozenset(
    {
        torch.ops.aten._assert_async.default,
        torch.ops.aten._assert_async.msg,
        torch.ops.aten._linalg_check_errors.default,
        ENQUEUE,
        REPEAT_WHILE,
    }
)


def is_check(node: torch.fx.Node, controls: Sequence[Control] = ()) -> bool:
    """Return whether a node is needed without a reader: it checks values, or shows them.

    Args:
        node: The node.
        controls: The controls of the trace; one that enqueues an element counts.
    """
    if node.op == "call_function" and (node.target in _CHECKS or is_kept(node)):
        return True
    return node.target is CONTROL and any(
        inner.target is ENQUEUE for inner in with_bodies([node], controls)
    )


def is_mutating(node: torch.fx.Node) -> bool:
    """Return whether a node is an operator that changes one of its arguments."""
    return (
        node.op == "call_function"
        and isinstance(node.target, OpOverload)
        and schema_of(node.target).is_mutable
    )


def unchanged(node: torch.fx.Node) -> torch.fx.Node:
    """Return the node of a tensor before its change in place; other nodes are returned as is."""
    while is_mutating(node) and isinstance(node.args[0], torch.fx.Node):
        node = node.args[0]
    return node


class _Replay(torch.fx.Interpreter):
    """Runs a graph node by node, and records the new node of each watched one."""

    def __init__(
        self,
        module: torch.fx.GraphModule,
        watched: Collection[torch.fx.Node],
        recorder: PureRecorder,
    ) -> None:
        super().__init__(module)
        self._recorder = recorder
        self._watched = frozenset(watched)
        self.became: dict[torch.fx.Node, torch.fx.Node] = {}
        self.taken_parts: dict[torch.fx.Node, torch.fx.Node] = {}
        self._views = Views()

    def run_node(self, n: torch.fx.Node) -> Any:
        try:
            with self._noting_parts(n) if is_mutating(n) else nullcontext():
                result = super().run_node(n)
        except RuntimeError as error:
            if not is_mutating(n):
                raise
            source, target = origin_of(n).source, cast(OpOverload, n.target)
            raise Error(
                f"Unsupported ops found in compiled model: [{schema_of(target).name}]"
                f"{f' at {source}' if source else ''} changes a tensor in place, which PyTorch "
                "cannot remove from a traced model. Call the operator that returns a new tensor."
            ) from error
        if n in self._watched:
            self.became[n] = _node_of(result)
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        with host_computation():
            return self._recorder.attribute(super().get_attr(target, args, kwargs))

    def fetch_args_kwargs_from_env(self, n: torch.fx.Node) -> Any:
        if not is_view(n):
            # Its inputs are updated one by one, in the order in which PyTorch would do it.
            for node in n.all_input_nodes:
                if self._views.has_part(node):
                    with self._noting_parts(node):
                        _bring_up_to_date(self.env[node])
        return super().fetch_args_kwargs_from_env(n)

    @contextmanager
    def _noting_parts(self, node: torch.fx.Node) -> Iterator[None]:
        """Record which new nodes recompute a part while the views of ``node`` are recomputed."""
        if not self._views.has_part(node):
            yield
            return
        graph = self._recorder.graph
        last = next(iter(reversed(graph.nodes)))
        yield
        created = itertools.takewhile(lambda one: one is not last, reversed(graph.nodes))
        views = self._views.views_to(node)
        self.taken_parts.update(taken_parts(views, list(created)[::-1]))


def _bring_up_to_date(value: Any) -> None:
    if isinstance(value, torch.Tensor) and is_functionaltensor(value):
        functionalize_sync(value)


def _node_of(value: Any) -> torch.fx.Node:
    _bring_up_to_date(value)
    if isinstance(value, torch.Tensor) and is_functionaltensor(value):
        value = unwrap_functional_tensor(value, True)
    return node_of(value)


def functionalise_graph(
    module: torch.fx.GraphModule, watched: Collection[torch.fx.Node]
) -> tuple[torch.fx.GraphModule, dict[torch.fx.Node, torch.fx.Node]]:
    """Return a graph without mutation that computes the same.

    Args:
        module: A graph of ATen operators whose placeholders have fake tensors in ``meta["val"]``.
            It changes, but computes the same: conversions of numbers become filled tensors,
            ``as_strided`` gets other arguments, and changes through it and ``unfold`` are written
            back explicitly.
        watched: Nodes whose successors the caller needs.

    Returns:
        The new graph (the given one if it has no mutation) and, for each watched node, the node
        of the new graph that has its value.
    """
    for node in module.graph.nodes:
        if node.target is torch.ops.aten._to_copy.default:
            _fill_from_number(node)
    refer_to_memory(module.graph)
    if not any(is_mutating(node) for node in module.graph.nodes):
        return module, {node: node for node in watched}
    write_windows_back(module.graph)
    # A graph without inputs has the tensors elsewhere.
    every = (node.meta.get("val") for node in module.graph.nodes)
    fake_mode = next(value.fake_mode for value in every if isinstance(value, FakeTensor))
    with torch.no_grad(), fx_traceback.preserve_node_meta():
        try:
            functional, became = rewrite(module, watched, PureRecorder(fake_mode))
        except Unproven:
            functional, became = replayed(module, watched, PureRecorder(fake_mode))
    # A change recomputes views of the changed tensor; some of them have no reader.
    functional.graph.eliminate_dead_code(lambda node: node.is_impure() or is_check(node))
    return functional, became


def _fill_from_number(node: torch.fx.Node) -> None:
    """Replace the conversion of a Python number, which ``torch.vmap`` adds, by a filled tensor."""
    number, value = node.args[0], node.meta["val"]
    if isinstance(number, (bool, int, float, complex)):
        node.target = torch.ops.aten.full.default
        node.args = (list(value.shape), number)
        node.kwargs = {"dtype": value.dtype, "device": value.device}


def replayed(
    module: torch.fx.GraphModule, watched: Collection[torch.fx.Node], recorder: PureRecorder
) -> tuple[torch.fx.GraphModule, dict[torch.fx.Node, torch.fx.Node]]:
    """Return a graph from which PyTorch has removed mutation; dead nodes may be left in it.

    Args:
        module: A graph of ATen operators.
        watched: Nodes whose successors the caller needs.
        recorder: Makes the new graph.

    Returns:
        The new graph, and the node of it that has the value of each watched node.
    """
    replay = _Replay(module, watched, recorder)
    values = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    inputs = [recorder.placeholder(f"arg{i}_1", value) for i, value in enumerate(values)]
    with recorder:
        run = functionalize(replay.run, remove="mutations_and_views")
        functional = recorder.finish(run(*inputs))
    for node, part in replay.taken_parts.items():
        restore(node, part)
    return functional, replay.became
