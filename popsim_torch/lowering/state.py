"""Parameters and buffers on the device, and the changes that forward makes to them."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
import torch.fx

from popsim_torch import logs
from popsim_torch.dtypes import dtype_name
from popsim_torch.errors import Error
from popsim_torch.ir import Attribute, Phase, Program, Role, Tensor, TensorKind
from popsim_torch.lowering.emit.builder import Builder, Place
from popsim_torch.lowering.rules.norms import ignores
from popsim_torch.lowering.rules.views import is_view
from popsim_torch.lowering.steps import is_all_of
from popsim_torch.trace.graph.origin import origin_of
from popsim_torch.trace.named_graph import NamedGraph

_MAX_ALIKE = 3  # buffers with the same name that a message lists one by one (count)


class StateLowering:
    """Adds the placeholders of a traced graph, and the writes of those that forward changes.

    Args:
        builder: The graph under construction.
        program: Receives the inputs, parameters and buffers.
        traced: The graph being lowered.
        needed: The nodes that are lowered.
    """

    def __init__(
        self,
        builder: Builder,
        program: Program,
        traced: NamedGraph,
        needed: set[torch.fx.Node],
    ) -> None:
        self._builder = builder
        self._program = program
        self._traced = traced
        self._needed = needed
        self._changes = {write.args[0]: write for write in traced.lasting_changes()}
        # Their steps copy them, if their old values are read.
        steps = traced.traced.steps.values()
        self._stepped = {name for step in steps for name in step.parameters}
        # Variables whose readers use a copy from before the change.
        self._variables: dict[torch.fx.Node, Tensor] = {}

    def add_placeholders(self) -> torch.fx.Node | None:
        """Add parameters, buffers and inputs; return the loss scale's placeholder, if any."""
        trace = self._traced.traced
        state = [*trace.parameters.items(), *trace.buffers.items()]
        end = self._traced.first_input + trace.num_inputs
        self._warn_of_frozen(list(trace.buffers))
        for position, node in enumerate(self._traced.placeholders[:end]):
            if position >= self._traced.first_input:
                self._add(node, TensorKind.INPUT, Role.INPUT)
            elif node in self._needed:
                name, host = state[position]
                self._add_state(node, name, host)
        rest = self._traced.placeholders[end:]
        return rest[0] if rest else None

    def _warn_of_frozen(self, buffers: list[str]) -> None:
        """Warn of buffers that keep their present value: those that are not floating-point."""
        nodes = self._traced.placeholders[len(self._traced.traced.parameters) :]
        trace = self._traced.traced
        frozen = [
            name
            for name, node in zip(buffers, nodes, strict=False)
            if name in trace.read_constants
            or (trace.is_constant(name) and (node.users or node in self._changes))
        ]
        if frozen:
            logs.python.warning(
                "Buffers of integer types are constants of the compiled model, and keep the value "
                "they have now: %s",
                _in_one_line(frozen),
            )
        lost = self._traced.lost_changes()
        lasting = set(self._traced.lasting_changes())
        counted = [
            name
            for name, node in zip(buffers, nodes, strict=False)
            if node in lost and _is_read(node, lasting)
        ]
        if counted:
            logs.python.warning(
                "forward changes %s, which is a constant: each run begins with the former value. "
                "Make it a buffer of floating-point numbers, such as torch.zeros(()): changes of "
                "those last, and its .long() can be an index.",
                _in_one_line(counted),
            )

    def write_changes(self) -> None:
        """Write new values of buffers back, and record which inputs were changed."""
        for target, write in self._changes.items():
            position = self._traced.placeholders.index(target)  # type: ignore[arg-type]
            source: Any = write.args[1]
            value = self._builder.tensor(source)
            if position >= self._traced.first_input:
                self._program.changed_inputs[position - self._traced.first_input] = value.id
            else:
                self._assign(target, value)

    def _assign(self, target: Any, source: Tensor) -> None:
        variable = self._variables[target]
        name = self._traced.names[target]
        if name in self._stepped and is_all_of(variable, source):
            return
        view = self._builder.graph.add_view(
            variable, variable.shape, variable.strides, variable.offset
        )
        # The body of a device loop may carry values that it computes from gradients.
        written = self._builder.written_in(source)
        late = name in self._stepped or (written is not None and written[0] == Phase.BACKWARD)
        phase = Phase.BACKWARD if late else Phase.FORWARD
        place = Place(phase, self._stage_of_change(target), f"assign {name}")
        if self._builder.graph.root(source) is self._builder.graph.root(variable):
            # The source must not be overwritten while another layout of it is read.
            apart = self._builder.value(source.dtype, source.shape)
            self._builder.op("copy", [source], [apart], place=place)
            source = apart
        attributes: dict[str, Attribute] = {}
        if source.dtype != variable.dtype:
            attributes["dtype"] = dtype_name(variable.dtype)
        self._builder.op("copy", [source], [view], attributes, place=place)
        self._program.changed_state.append(name)

    def _add(self, node: torch.fx.Node, kind: TensorKind, role: Role) -> Tensor:
        value: torch.Tensor = node.meta["val"]
        tensor = self._builder.graph.add_tensor(
            kind, value.dtype, value.shape, name=self._traced.names[node], role=role
        )
        self._builder.values[node] = tensor
        return tensor

    def _add_state(self, node: torch.fx.Node, name: str, host: torch.Tensor) -> None:
        if self._traced.traced.is_constant(name):
            self._builder.values[node] = self._builder.constant(host.detach().clone())
            return
        is_parameter = name in self._traced.traced.parameters
        role = Role.PARAMETER if is_parameter else Role.BUFFER
        tensor = self._add(node, TensorKind.VARIABLE, role)
        tensor.replica_groups = self._traced.traced.replica_groups.get(name, ())
        self._variables[node] = tensor
        known = self._program.parameters if is_parameter else self._program.buffers
        known[name] = tensor.id
        if node in self._changes and name not in self._stepped:
            self._keep_old_value(node, tensor)

    def _keep_old_value(self, node: torch.fx.Node, tensor: Tensor) -> None:
        """Let all readers see the value that a placeholder had before forward changed it.

        Readers after the change, in the backward pass or on a later stage, get a copy. Readers on
        an earlier stage are refused: that stage already works on the next micro-batch at the
        change.
        """
        stage = self._stage_of_change(node)
        after = False
        for reader in self._readers(node):
            origin = origin_of(reader)
            if not origin.backward and origin.stage < stage:
                raise Error(
                    f"The buffer '{tensor.name}' is read on pipeline stage {origin.stage} and "
                    f"changed on stage {stage}. Read and change it on the same stage."
                )
            reads_late = origin.backward or origin.stage > stage
            after = after or (reads_late and not ignores(reader, node))
        if after:
            self._give_copy(node, tensor)

    def _readers(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """Return the nodes that read a placeholder's old value, also through a view."""
        todo, readers = [node], dict[torch.fx.Node, None]()
        while todo:
            for user in todo.pop().users:
                if user not in self._needed or user in readers or user is self._changes[node]:
                    continue
                readers[user] = None
                if is_view(user) or user.target is operator.getitem:
                    todo.append(user)
        return list(readers)

    def _give_copy(self, node: torch.fx.Node, tensor: Tensor) -> None:
        copy = self._builder.value(tensor.dtype, tensor.shape)
        place = Place(Phase.FORWARD, self._stage_of_change(node), f"{tensor.name} before forward")
        self._builder.op("copy", [tensor], [copy], place=place)
        self._builder.values[node] = copy

    def _stage_of_change(self, node: torch.fx.Node) -> int:
        source: Any = self._changes[node].args[1]
        return origin_of(source).stage


def _is_read(placeholder: torch.fx.Node, lasting: Collection[torch.fx.Node]) -> bool:
    """Return whether results depend on a buffer; a counter of batch norm only counts.

    Args:
        placeholder: The buffer.
        lasting: Nodes that change other buffers and inputs for good.
    """
    seen, todo = {placeholder}, [placeholder]
    while todo:
        for user in todo.pop().users:
            if user.op == "output" or user in lasting:
                return True
            if user not in seen:
                seen.add(user)
                todo.append(user)
    return False


def _in_one_line(names: list[str]) -> str:
    """Return names of buffers in one line; for similar names the first one and their number."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(name.rpartition(".")[2], []).append(name)
    parts = [
        ", ".join(found) if len(found) <= _MAX_ALIKE else f"{found[0]} and {len(found) - 1} like it"
        for found in alike.values()
    ]
    return ", ".join(parts)
