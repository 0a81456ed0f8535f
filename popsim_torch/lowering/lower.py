"""Drives the lowering of one traced model."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from popsim_torch._update_types import OptimizerPlan
from popsim_torch.anchors import AnchorRequest
from popsim_torch.enums import OutputMode
from popsim_torch.errors import Error, closest_names
from popsim_torch.ir import Graph, Phase, Tensor, TensorKind, verify
from popsim_torch.lowering.aten import lower_aten
from popsim_torch.lowering.builder import Builder, Place, Value
from popsim_torch.lowering.creation import is_filled, is_random, lower_filled, lower_random
from popsim_torch.lowering.dense import is_dense, lower_dense
from popsim_torch.lowering.elementwise import is_elementwise, lower_elementwise
from popsim_torch.lowering.program import AnchorTarget, LoopCounts, Program
from popsim_torch.lowering.returns import ReturnLowering
from popsim_torch.lowering.update import UpdateLowering
from popsim_torch.lowering.views import is_view, lower_view
from popsim_torch.passes.functionalise import functionalise, is_mutating
from popsim_torch.trace import TraceResult
from popsim_torch.trace.markers import CONSTANT, MARK, PRINT
from popsim_torch.trace.names import (
    NameTable,
    gradient_name,
    input_names,
    print_title,
    without_old_prefix,
)

_BATCH_NORM_BACKWARD = torch.ops.aten.native_batch_norm_backward.default


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
    """

    traced: TraceResult
    loop: LoopCounts
    output_mode: OutputMode
    output_period: int
    anchors: Sequence[AnchorRequest]
    plan: Callable[[Sequence[str]], OptimizerPlan] | None
    pipelined: bool


class _Lowering:
    def __init__(self, request: LoweringRequest) -> None:
        self._request = request
        self._traced = request.traced
        watched = set(self._traced.forward_of.values())
        module, became = functionalise(self._traced.graph_module, watched)
        self._fx = module.graph
        self._nodes = list(self._fx.nodes)
        self._placeholders = [node for node in self._nodes if node.op == "placeholder"]
        self._results: list[Any] = list(self._nodes[-1].args[0])  # type: ignore[arg-type]
        self._forward_of = {key: became[n] for key, n in self._traced.forward_of.items()}
        self._plan = None
        if request.plan is not None:
            self._plan = request.plan(self._traced.gradients)
        self._names = NameTable()
        self._by_name: dict[str, torch.fx.Node] = {}
        self._name_nodes()
        self._program = Program(Graph())
        self._needed = self._needed_nodes()
        self._builder = Builder(self._program.graph, self._needed)
        self._snapshots: dict[torch.fx.Node, Tensor] = {}

    def run(self) -> Program:
        self._add_placeholders()
        for node in self._nodes:
            if node.op == "call_function" and node in self._needed:
                self._builder.values[node] = self._lower_node(node)
                self._set_name(node)
        self._assign_changed()
        self._add_updates()
        self._order_by_phase()
        self._add_returns()
        verify(self._program.graph)
        self._program.num_stages = 1 + max((op.stage for op in self._program.graph.ops), default=0)
        return self._program

    # Names

    def _name_nodes(self) -> None:
        for name, node in zip(self._placeholder_names(), self._placeholders, strict=True):
            self._names.set(node, name)
        self._names.name_forward(self._fx)
        for node in self._nodes:
            if node.target is MARK:
                name = self._marked_name(int(node.args[1]))  # type: ignore[arg-type]
                if name is not None:
                    self._names.set(node, gradient_name(name))
        self._by_name = {name: node for node, name in self._names.of_node.items()}

    def _placeholder_names(self) -> list[str]:
        names = [*self._traced.parameters, *self._traced.buffers]
        names += input_names(self._traced.num_inputs)
        if self._plan is not None:
            names.append(self._plan.loss_scaling.name)
        return names

    def _marked_name(self, key: int) -> str | None:
        """Return the name of the tensor whose gradient a mark shows; None if it has none."""
        if key in self._traced.parameter_of:
            return self._traced.parameter_of[key]
        return self._names.of_node.get(self._forward_of[key])

    def _set_name(self, node: torch.fx.Node) -> None:
        value = self._builder.values[node]
        if node in self._names.of_node and isinstance(value, Tensor):
            self._program.graph.set_name(value, self._names.of_node[node])

    def _place(self, node: torch.fx.Node) -> Place:
        name = self._names.of_node.get(node)
        if name is None:
            user = next((u for u in node.users if u in self._names.of_node), None)
            name = node.name if user is None else self._names.of_node[user]
        return self._builder.place_of(node, name)

    # What is needed

    def _changed(self) -> list[torch.fx.Node]:
        """Return the nodes that write a placeholder's new value, behind everything else."""
        return [node for node in self._nodes if is_mutating(node)]

    def _is_kept(self, write: torch.fx.Node) -> bool:
        """Whether a change lasts: of inputs, parameters and floating-point buffers it does."""
        target: Any = write.args[0]
        return bool(target.meta["val"].dtype.is_floating_point) or (
            self._placeholders.index(target) >= self._first_input()
        )

    def _first_input(self) -> int:
        return len(self._traced.parameters) + len(self._traced.buffers)

    def _needed_nodes(self) -> set[torch.fx.Node]:
        todo = [node for node in self._results if isinstance(node, torch.fx.Node)]
        todo += [node for node in self._changed() if self._is_kept(node)]
        for anchor in self._request.anchors:
            node = self._find_node(anchor.long_name)
            if node is not None:
                todo.append(node)
        needed: set[torch.fx.Node] = set()
        while todo:
            node = todo.pop()
            if node not in needed:
                needed.add(node)
                todo.extend(node.all_input_nodes)
        return needed

    def _find_node(self, name: str) -> torch.fx.Node | None:
        for candidate in (name, *without_old_prefix(name)):
            if candidate in self._by_name:
                return self._by_name[candidate]
        return None

    # Placeholders

    def _add_placeholders(self) -> None:
        num_parameters = len(self._traced.parameters)
        first_input = self._first_input()
        state = [*self._traced.parameters.items(), *self._traced.buffers.items()]
        for position, node in enumerate(self._placeholders):
            if position < first_input:
                if node in self._needed:
                    name, host = state[position]
                    self._add_state(node, name, host, is_buffer=position >= num_parameters)
            elif position < first_input + self._traced.num_inputs:
                tensor = self._add_tensor(node, TensorKind.INPUT)
                self._program.inputs.append(tensor.id)
                self._set_name(node)
            else:
                self._add_loss_scale(node)

    def _add_tensor(self, node: torch.fx.Node, kind: TensorKind) -> Tensor:
        value: torch.Tensor = node.meta["val"]
        tensor = self._program.graph.add_tensor(kind, value.dtype, value.shape)
        self._builder.values[node] = tensor
        return tensor

    def _add_state(
        self, node: torch.fx.Node, name: str, host: torch.Tensor, *, is_buffer: bool
    ) -> None:
        if not host.dtype.is_floating_point:
            self._builder.values[node] = self._builder.constant(host.detach().clone())
            return
        tensor = self._add_tensor(node, TensorKind.VARIABLE)
        self._set_name(node)
        known = self._program.buffers if is_buffer else self._program.parameters
        known[name] = tensor.id
        changed = any(write.args[0] is node and self._is_kept(write) for write in self._changed())
        if changed and self._read_later(node):
            self._snapshot(node, tensor)

    def _read_later(self, node: torch.fx.Node) -> bool:
        """Whether the backward pass reads a placeholder that forward has changed by then."""
        todo, seen = [node], {node}
        while todo:
            for user in todo.pop().users:
                if user not in self._needed or user in seen or is_mutating(user):
                    continue
                if self._place(user).phase == Phase.BACKWARD and not self._ignores(user, node):
                    return True
                if is_view(user):
                    seen.add(user)
                    todo.append(user)
        return False

    @staticmethod
    def _ignores(user: torch.fx.Node, node: torch.fx.Node) -> bool:
        """Batch norm's backward gets running statistics, but uses them in eval mode only."""
        return (
            user.target is _BATCH_NORM_BACKWARD and user.args[7] is True and node in user.args[3:5]
        )

    def _snapshot(self, node: torch.fx.Node, tensor: Tensor) -> None:
        """Let everybody read the value that a placeholder had before forward changed it."""
        copy = self._builder.value(tensor.dtype, tensor.shape)
        place = Place(Phase.FORWARD, 0, f"{tensor.name} before forward")
        self._builder.op("copy", [tensor], [copy], place=place)
        self._snapshots[node] = tensor
        self._builder.values[node] = copy

    def _add_loss_scale(self, node: torch.fx.Node) -> None:
        assert self._plan is not None
        tensor = self._add_tensor(node, TensorKind.VARIABLE)
        self._program.scalars[self._plan.loss_scaling.name] = tensor.id
        if not self._plan.loss_scaling.constant:
            self._set_name(node)

    # Nodes

    def _lower_node(self, node: torch.fx.Node) -> Value:
        builder = self._builder
        if node.target is operator.getitem:
            producer: Any = node.args[0]
            values: Any = builder.values[producer]
            value: Value = values[node.args[1]]
            return value
        place = self._place(node)
        if node.target is PRINT:
            return self._lower_print(node, place)
        if node.target is CONSTANT:
            data = self._traced.constants[int(node.args[2])]  # type: ignore[arg-type]
            return builder.constant(data.detach().clone().contiguous())
        if not isinstance(node.target, torch._ops.OpOverload):
            raise Error(
                f"Unsupported ops found in compiled model: [{node.target}] in '{place.name}' is "
                "not an ATen operator."
            )
        if is_mutating(node):
            return None
        if is_view(node):
            return lower_view(builder, node, place)
        if is_filled(node):
            return lower_filled(builder, node, place)
        if is_random(node):
            return lower_random(builder, node, place)
        if is_elementwise(node):
            return lower_elementwise(builder, node, place)
        if is_dense(node):
            return lower_dense(builder, node, place)
        if node.target is _BATCH_NORM_BACKWARD and node.args[7] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])
        return lower_aten(builder, node, place)

    def _lower_print(self, node: torch.fx.Node, place: Place) -> Tensor:
        request = self._traced.prints[int(node.args[1])]  # type: ignore[arg-type]
        source: Any = node.args[0]
        tensor = self._builder.tensor(source)
        title = print_title(request.title, self._printed_name(node), request.gradient)
        text_format = request.text_format
        out = self._program.graph.add_view(tensor, tensor.shape, tensor.strides, tensor.offset)
        self._builder.op(
            "print",
            [tensor],
            [out],
            {
                "title": title,
                "summarise_threshold": text_format.summarise_threshold,
                "edge_items": text_format.edge_items,
                "max_line_width": text_format.max_line_width,
                "digits": text_format.digits,
                "float_format": text_format.float_format,
                "separator": text_format.separator,
                "open_bracket": text_format.open_bracket,
                "close_bracket": text_format.close_bracket,
            },
            place=place,
            fixed_phase=True,
        )
        return out

    def _printed_name(self, node: torch.fx.Node) -> str:
        """Return the name of what a print shows; of a gradient, the tensor it is the gradient of."""
        request = self._traced.prints[int(node.args[1])]  # type: ignore[arg-type]
        if not request.gradient:
            source: Any = node.args[0]
            return self._names.of_node.get(source, source.name)
        for forward in self._nodes:
            if forward.target is PRINT and forward.args[1] == int(node.args[1]) - 1:  # type: ignore[operator]
                return self._printed_name(forward)
        return node.name

    # Behind the traced nodes

    def _assign_changed(self) -> None:
        """Write new values of buffers back; note the inputs that were changed."""
        for write in self._changed():
            if not self._is_kept(write):
                continue
            target: Any = write.args[0]
            source = self._builder.tensor(write.args[1])  # type: ignore[arg-type]
            position = self._placeholders.index(target)
            if position >= self._first_input():
                self._program.changed_inputs.append(position - self._first_input())
                continue
            variable = self._snapshots.get(target) or self._builder.tensor(target)
            name = self._names.of_node[target]
            written = self._builder.written_in(source)
            stage = 0 if written is None else written[1]
            view = self._program.graph.add_view(
                variable, variable.shape, variable.strides, variable.offset
            )
            self._builder.op(
                "copy", [source], [view], place=Place(Phase.FORWARD, stage, f"assign {name}")
            )
            if name in self._program.buffers:
                self._program.changed_buffers.append(name)

    def _add_updates(self) -> None:
        if self._plan is None:
            return
        graph = self._program.graph
        parameters = {n: graph.tensors[i] for n, i in self._program.parameters.items()}
        results = self._results[self._traced.num_outputs :]
        gradients = {
            name: self._builder.tensor(node)
            for name, node in zip(self._traced.gradients, results, strict=True)
        }
        UpdateLowering(self._builder, self._program, parameters, gradients).lower(self._plan)

    def _order_by_phase(self) -> None:
        self._program.graph.ops.sort(key=lambda op: op.phase)

    def _add_returns(self) -> None:
        request, graph = self._request, self._program.graph
        returns = ReturnLowering(self._program, request.loop, pipelined=request.pipelined)
        for node in self._results[: self._traced.num_outputs]:
            returns.add_output(
                self._builder.tensor(node), request.output_mode, request.output_period
            )
        self._program.num_outputs = len(self._program.returns)
        sources = {write.args[0]: write.args[1] for write in self._changed()}
        for position in self._program.changed_inputs:
            source: Any = sources[self._placeholders[self._first_input() + position]]
            returns.add_output(self._builder.tensor(source), OutputMode.All, 1)
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
