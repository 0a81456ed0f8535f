"""From the named graph of a trace to a program: node by node, then the weight update."""

from __future__ import annotations

import operator
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
from popsim_torch.lowering.bodies import BodyBuilder, lower_control
from popsim_torch.lowering.emit.builder import Builder, HalfPartials, Place, Value
from popsim_torch.lowering.loss_scale import LossScaleLowering
from popsim_torch.lowering.rules.aten import unsupported
from popsim_torch.lowering.rules.creation import is_random
from popsim_torch.lowering.rules.host import warn_of_calls_left_out
from popsim_torch.lowering.rules.prints import lower_print
from popsim_torch.lowering.rules.table import RULES
from popsim_torch.lowering.state import StateLowering
from popsim_torch.lowering.steps import StepLowering, is_put_there
from popsim_torch.lowering.update import UpdateLowering
from popsim_torch.optim.captures import GradientEnqueue
from popsim_torch.optim.plan import OptimizerPlan
from popsim_torch.private_torch.operators import OpOverload, schema_of
from popsim_torch.trace.graph.bodies import CONTROL, Control, control_of
from popsim_torch.trace.graph.functionalise import is_mutating
from popsim_torch.trace.graph.markers import CONSTANT, MARK, PRINT
from popsim_torch.trace.graph.origin import origin_of
from popsim_torch.trace.named_graph import NamedGraph
from popsim_torch.trace.weight_steps import STEP

_OWN_TARGETS = (operator.getitem, PRINT, CONSTANT, CONTROL, STEP)


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
        # An update needs its weight, though nobody else may read it.
        updated = set() if plan is None else {update.parameter for update in plan.updates}
        self._needed = named.needed(
            node
            for name, node in named.by_name.items()
            if name in updated or self._program.offers.asked(name)
        )
        streams = named.streams(is_random)
        self._builder = Builder(self._program.graph, self._needed, streams, half_partials)
        rule = None if plan is None else plan.loss_scale_rule
        self._loss_scale = (
            None if rule is None else LossScaleLowering(self._builder, self._program, rule)
        )
        self._state = StateLowering(self._builder, self._program, named, self._needed)
        self._updates = UpdateLowering(self._builder, self._program, self._loss_scale)
        self._steps: StepLowering | None = None
        if plan is not None and named.traced.steps:
            self._steps = StepLowering(self._builder, named, self._needed, plan, self._updates)

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
        """Refuse what the device cannot run: all of it at once."""
        reasons: dict[str, str] = {}
        needed = (node for node in self._named.nodes if node in self._needed)
        for node in self._named.with_bodies(needed):
            target: Any = node.target
            if node.op != "call_function" or target in _OWN_TARGETS:
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
        self._lower_named(self._builder, node)
        for op in self._program.graph.ops[num_ops:]:
            self._program.sources |= dict.fromkeys(op.outputs, node.name)
        self._program.sources.pop(NO_TENSOR, None)

    def _lower_named(self, builder: Builder, node: torch.fx.Node) -> None:
        value = self._lower_node(builder, node)
        builder.values[node] = value
        name = self._named.names.get(node)
        # What a gradient computes once more has its names where it is computed first.
        if (
            name is not None
            and isinstance(value, Tensor)
            and (builder.named or node.target is MARK)
        ):
            builder.graph.set_name(value, name)

    def _lower_body(
        self, builder: BodyBuilder, function: torch.fx.GraphModule
    ) -> dict[str, Tensor]:
        """Lower the nodes of a body; return those of its tensors that are asked for, by name."""
        for node in function.graph.nodes:
            if node.op == "call_function":
                self._lower_named(builder, node)
        return self._program.offers.of_body(builder.graph)

    def _lower_control(
        self, builder: Builder, node: torch.fx.Node, control: Control, place: Place
    ) -> Value:
        inputs: Any = node.args[0]
        results, found = lower_control(
            builder,
            control,
            [builder.tensor(source) for source in inputs],
            place,
            self._lower_body,
        )
        for name, tensor in found.items():
            builder.graph.set_name(tensor, name)
        return results

    def _lower_node(self, builder: Builder, node: torch.fx.Node) -> Value:
        if node.target is operator.getitem:
            producer: Any = node.args[0]
            values: Any = builder.values[producer]
            value: Value = values[node.args[1]]
            return value
        place = builder.place_of(node, self._named.message_name(node))
        if node.target is STEP:
            assert self._steps is not None
            return self._steps.lower(node, place)
        if is_put_there(node):
            return builder.values[node.args[1]]  # type: ignore[index]
        control = control_of(node, self._named.traced.controls)
        if control is not None:
            return self._lower_control(builder, node, control, place)
        if node.target is PRINT:
            return lower_print(builder, self._named, node, place)
        if node.target is CONSTANT:
            index: Any = node.args[2]
            return builder.constant(self._named.traced.constants[index])
        if is_mutating(node):
            return None
        return RULES.rule_of(node).lower(builder, node, place)

    def _add_aliases(self) -> None:
        """Give tensors that the program has their further names, or offer these."""
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
        """Note the tensors that what comes later asks for: outputs and checkpoints."""
        graph = self._program.graph
        self._program.outputs = [self._builder.tensor(node).id for node in self._named.outputs()]
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
        half_partials: Which products of float16 operands add up in float16.
        anchors: Tensors that the program has even if nothing else needs them.
        gradients: Those that go into queues.

    Raises:
        Error: An operator the device does not know.
    """
    return _Lowering(named, plan, half_partials, anchors, gradients).run()
