"""Drives the lowering of one traced model."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from popsim_torch.anchors import AnchorRequest
from popsim_torch.enums import OutputMode
from popsim_torch.errors import Error, closest_names
from popsim_torch.ir import Graph, Tensor, TensorKind
from popsim_torch.lowering.builder import Builder, HalfPartials, Value
from popsim_torch.lowering.program import AnchorTarget, LoopCounts, Program
from popsim_torch.lowering.returns import ReturnLowering
from popsim_torch.lowering.rules.aten import check_results
from popsim_torch.lowering.rules.creation import is_random
from popsim_torch.lowering.rules.prints import lower_print
from popsim_torch.lowering.rules.table import RULES
from popsim_torch.lowering.state import StateLowering
from popsim_torch.lowering.update import UpdateLowering
from popsim_torch.optim.plan import OptimizerPlan
from popsim_torch.passes.pipeline import run_passes
from popsim_torch.passes.recompute import COPY_SUFFIX, recompute
from popsim_torch.passes.recompute_choice import Recomputation
from popsim_torch.trace import TraceResult
from popsim_torch.trace.functionalise import is_mutating
from popsim_torch.trace.markers import CONSTANT, PRINT
from popsim_torch.trace.named_graph import TracedGraph
from popsim_torch.trace.names import gradient_name, without_old_prefix


@dataclass(frozen=True)
class LoweringRequest:
    """What to make of a traced model.

    Attributes:
        traced: The trace.
        loop: How often a call runs the model.
        output_mode: Which outputs come back; not ``Default``.
        output_period: For ``EveryN``.
        anchors: Anchor requests with resolved modes.
        plan: The optimizer, for training: made from the names of the differentiable parameters.
        pipelined: Several micro-batches are in flight at a time.
        half_partials: Which products of float16 operands add up in float16.
        recomputation: Which forward values the backward pass rebuilds.
    """

    traced: TraceResult
    loop: LoopCounts
    output_mode: OutputMode
    output_period: int
    anchors: Sequence[AnchorRequest]
    plan: Callable[[Sequence[str]], OptimizerPlan] | None
    pipelined: bool
    half_partials: HalfPartials
    recomputation: Recomputation = Recomputation.NONE


class _Lowering:
    def __init__(self, request: LoweringRequest) -> None:
        self._request = request
        self._plan = None if request.plan is None else request.plan(request.traced.gradients)
        loss_scale = None if self._plan is None else self._plan.loss_scaling.name
        self._traced = TracedGraph(request.traced, loss_scale)
        anchored = (self._traced.find(anchor.long_name) for anchor in request.anchors)
        self._needed = self._traced.needed(node for node in anchored if node is not None)
        self._program = Program(Graph())
        random = filter(is_random, self._traced.nodes)
        self._builder = Builder(self._program.graph, self._needed, random, request.half_partials)
        self._state = StateLowering(self._builder, self._program, self._traced, self._needed)

    def run(self) -> Program:
        loss_scale = self._state.add_placeholders()
        if loss_scale is not None:
            self._add_loss_scale(loss_scale)
        for node in self._traced.nodes:
            if node.op == "get_attr" and node in self._needed:
                self._builder.values[node] = self._builder.constant(self._traced.attribute(node))
            if node.op == "call_function" and node in self._needed:
                self._add_node(node)
        self._state.write_changes()
        self._add_updates()
        graph = self._program.graph
        graph.ops.sort(key=lambda op: op.phase)
        recompute(graph, self._request.recomputation, self._checkpoints())
        self._add_returns()
        run_passes(graph)
        self._program.num_stages = 1 + max((op.stage for op in graph.ops), default=0)
        return self._program

    def _add_loss_scale(self, node: torch.fx.Node) -> None:
        assert self._plan is not None
        scale = self._plan.loss_scaling
        tensor = self._program.graph.add_tensor(
            TensorKind.VARIABLE, torch.float32, (), name="" if scale.constant else scale.name
        )
        self._builder.values[node] = tensor
        self._program.scalars[scale.name] = tensor.id

    def _add_node(self, node: torch.fx.Node) -> None:
        value = self._lower_node(node)
        self._builder.values[node] = value
        name = self._traced.names.get(node)
        if name is not None and isinstance(value, Tensor):
            self._program.graph.set_name(value, name)

    def _lower_node(self, node: torch.fx.Node) -> Value:
        if node.target is operator.getitem:
            producer: Any = node.args[0]
            values: Any = self._builder.values[producer]
            value: Value = values[node.args[1]]
            return value
        place = self._builder.place_of(node, self._traced.message_name(node))
        if node.target is PRINT:
            return lower_print(self._builder, self._traced, node, place)
        if node.target is CONSTANT:
            index: Any = node.args[2]
            return self._builder.constant(self._request.traced.constants[index])
        if not isinstance(node.target, torch._ops.OpOverload):
            raise Error(
                f"Unsupported ops found in compiled model: [{node.target}] in '{place.name}' is "
                "not an ATen operator."
            )
        if is_mutating(node):
            return None
        check_results(node, place)
        return RULES.rule_of(node).lower(self._builder, node, place)

    def _add_updates(self) -> None:
        if self._plan is None:
            return
        graph = self._program.graph
        parameters = {n: graph.tensors[i] for n, i in self._program.parameters.items()}
        gradients = {n: self._builder.tensor(g) for n, g in self._traced.gradients().items()}
        UpdateLowering(self._builder, self._program, parameters, gradients).lower(self._plan)

    def _checkpoints(self) -> set[int]:
        """Return the ids of the tensors that are kept where others are rebuilt."""
        values = (self._builder.values.get(node) for node in self._traced.checkpoints)
        graph = self._program.graph
        return {graph.root(value).id for value in values if isinstance(value, Tensor)}

    def _add_returns(self) -> None:
        request, graph = self._request, self._program.graph
        returns = ReturnLowering(self._program, request.loop, pipelined=request.pipelined)
        for node in self._traced.outputs():
            tensor = self._builder.tensor(node)
            returns.add_output(tensor, request.output_mode, request.output_period)
        self._program.num_outputs = len(self._program.returns)
        for position in self._program.changed_inputs:
            returns.add_output(self._state.changed_input(position), OutputMode.All, 1)
        for anchor in request.anchors:
            name = self._anchored_name(anchor)
            returns.add_anchor(graph.tensors[graph.names[name]], AnchorTarget(anchor, name))
        returns.finish()

    def _anchored_name(self, anchor: AnchorRequest) -> str:
        names = self._program.graph.names
        for candidate in (anchor.long_name, *without_old_prefix(anchor.long_name)):
            if candidate in names:
                return candidate
        closest = closest_names(anchor.long_name, names)
        hint = ""
        if anchor.long_name.startswith(gradient_name("")):
            hint = " A gradient exists only of what the loss depends on and what needs one."
        elif anchor.long_name.endswith(COPY_SUFFIX):
            hint = " A copy exists only of what recomputation rebuilds in the backward pass."
        raise Error(
            f"Options.anchorTensor: no tensor named '{anchor.long_name}' among the {len(names)} "
            f"tensors of this graph (Anchor tensor not in Ir Tensors).{hint} "
            + (f"Closest names: {', '.join(map(repr, closest))}. " if closest else "")
            + "Compile without the anchor and call model.getTensorNames() to list them all."
        )


def lower(request: LoweringRequest) -> Program:
    """Lower a traced model to a program of the device.

    Args:
        request: The trace, how often to run it, what to return and how to update.

    Raises:
        Error: An operator the device does not know, an anchor of an unknown name, or a return
            period that does not fit.
    """
    return _Lowering(request).run()
