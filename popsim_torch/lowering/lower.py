"""Lowers the named graph of a trace to a program: node by node, then the weight update."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.fx

from popsim_torch.anchors import AnchorRequest
from popsim_torch.errors import Error
from popsim_torch.ir import Program, Role, Tensor, TensorKind, walk_all
from popsim_torch.ir.graph import NO_TENSOR
from popsim_torch.ir.offers import Offers
from popsim_torch.lowering.accumulated import AccumulatedLowering
from popsim_torch.lowering.emit.builder import Builder, HalfPartials
from popsim_torch.lowering.loss_scale import LossScaleLowering
from popsim_torch.lowering.nodes import OWN_TARGETS, NodeLowering
from popsim_torch.lowering.rules.aten import unsupported
from popsim_torch.lowering.rules.creation import is_random
from popsim_torch.lowering.rules.host import warn_of_calls_left_out
from popsim_torch.lowering.state import StateLowering
from popsim_torch.lowering.steps import StepLowering
from popsim_torch.lowering.update import UpdateLowering
from popsim_torch.optim.captures import GradientEnqueue
from popsim_torch.optim.plan import OptimizerPlan
from popsim_torch.private_torch.operators import OpOverload, schema_of
from popsim_torch.trace.graph.bodies import with_bodies
from popsim_torch.trace.graph.functionalise import is_mutating
from popsim_torch.trace.graph.origin import origin_of
from popsim_torch.trace.named_graph import NamedGraph


class _Lowering:
    def __init__(
        self,
        named: NamedGraph,
        plan: OptimizerPlan | None,
        half_partials: HalfPartials,
        anchors: Iterable[AnchorRequest],
        gradients: Iterable[GradientEnqueue],
    ) -> None:
        self._named = named
        self._plan = plan
        self._enqueued_gradients = gradients
        self._program = Program(offers=Offers(tuple(anchors)))
        # An update needs its weight, even if no other op reads it.
        updated = set() if plan is None else {update.parameter for update in plan.updates}
        self._needed = named.needed(
            node
            for name, node in named.by_name.items()
            if name in updated or self._program.offers.asked_by_name(name)
        )
        streams = named.streams(is_random)
        self._builder = Builder(self._program.graph, self._needed, streams, half_partials)
        rule = None if plan is None else plan.loss_scale_rule
        self._loss_scale = (
            None if rule is None else LossScaleLowering(self._builder, self._program, rule)
        )
        self._state = StateLowering(self._builder, self._program, named, self._needed)
        self._updates = UpdateLowering(self._builder, self._program, self._loss_scale)
        steps: StepLowering | None = None
        if plan is not None and named.traced.steps:
            steps = StepLowering(self._builder, named, self._needed, plan, self._updates)
        accumulated = None
        if plan is not None:
            accumulated = AccumulatedLowering(self._builder, named, plan, self._updates)
        self._node_lowering = NodeLowering(named, self._program.offers, steps, accumulated)

    def run(self) -> Program:
        self._check_supported()
        loss_scale = self._state.add_placeholders()
        if loss_scale is not None:
            self._add_loss_scale(loss_scale)
        for node in self._named.nodes:
            if node.op == "get_attr" and node in self._needed:
                self._builder.values[node] = self._builder.constant(self._named.attribute(node))
            if node.op == "call_function" and node in self._needed:
                self._add_node(node)
        ops = [op for _, op in walk_all(self._program.graph)]
        warn_of_calls_left_out(self._named.traced.host_calls, ops)
        self._add_aliases()
        self._state.write_changes()
        self._add_updates()
        self._note_outputs()
        self._program.graph.ops.sort(key=lambda op: op.phase)
        return self._program

    def _check_supported(self) -> None:
        """Refuse operators that the device does not support: all of them in one message."""
        reasons: dict[str, str] = {}
        needed = (node for node in self._named.nodes if node in self._needed)
        for node in with_bodies(needed, self._named.traced.controls):
            target: Any = node.target
            if node.op != "call_function" or target in OWN_TARGETS:
                continue
            reason, name = "is not an ATen operator.", str(target)
            if isinstance(target, OpOverload):
                reason = "" if is_mutating(node) else unsupported(node)
                name = schema_of(target).name
            if reason and name not in reasons:
                place = self._builder.place_of(node, self._named.message_name(node))
                reasons[name] = f"{name} in {place.shown} {reason}"
        if reasons:
            raise Error(
                f"Unsupported ops found in compiled model: [{', '.join(reasons)}]. "
                + " ".join(reasons.values())
            )

    def _add_loss_scale(self, node: torch.fx.Node) -> None:
        assert self._plan is not None
        scale = self._plan.loss_scaling
        tensor = self._program.graph.add_tensor(
            TensorKind.VARIABLE,
            torch.float32,
            (),
            name="" if scale.constant else scale.name,
            role=Role.HYPER_PARAMETER,
        )
        self._builder.values[node] = tensor
        self._program.scalars[scale.name] = tensor.id
        if self._loss_scale is not None:
            stage = max((origin_of(node).stage for node in self._named.nodes), default=0)
            self._builder.values[node] = self._loss_scale.final_scale(tensor, stage)

    def _add_node(self, node: torch.fx.Node) -> None:
        num_ops = len(self._program.graph.ops)
        self._node_lowering.lower(self._builder, node)
        for op in self._program.graph.ops[num_ops:]:
            self._program.sources |= dict.fromkeys(op.outputs, node.name)
        self._program.sources.pop(NO_TENSOR, None)

    def _add_aliases(self) -> None:
        """Give tensors of the program their further names, or offer these tensors."""
        for name, node in self._named.aliases.items():
            value = self._builder.values.get(node)
            if isinstance(value, Tensor):
                self._program.offers.add(self._program.graph, name, partial(_itself, value))

    def _add_updates(self) -> None:
        if self._plan is None:
            return
        graph = self._program.graph
        gradients = {n: self._builder.tensor(g) for n, g in self._named.gradients().items()}
        self._updates.lower(self._plan, gradients, self._enqueued_gradients)
        if self._loss_scale is not None:
            scale = graph.tensors[self._program.scalars[self._plan.loss_scaling.name]]
            self._loss_scale.adapt(scale)

    def _note_outputs(self) -> None:
        """Record the tensors that later steps need: outputs, losses and checkpoints."""
        graph = self._program.graph
        self._program.outputs = [self._builder.tensor(node).id for node in self._named.outputs()]
        losses = map(self._builder.values.get, self._named.traced.differentiated)
        self._program.losses = [loss.id for loss in losses if isinstance(loss, Tensor)]
        kept = (self._builder.values.get(node) for node in self._named.traced.checkpoints)
        self._program.checkpoints = {
            graph.root(value).id for value in kept if isinstance(value, Tensor)
        }


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def lower(
    named: NamedGraph,
    plan: OptimizerPlan | None,
    half_partials: HalfPartials,
    anchors: Iterable[AnchorRequest] = (),
    gradients: Iterable[GradientEnqueue] = (),
) -> Program:
    """Lower a traced model to a program of the device.

    Args:
        named: The trace.
        plan: The optimizer's updates, for training.
        half_partials: The products of float16 operands that accumulate in float16.
        anchors: Tensors that the program contains even if nothing else needs them.
        gradients: The gradients that go into queues.

    Raises:
        Error: The device does not support an operator.
    """
    return _Lowering(named, plan, half_partials, anchors, gradients).run()
