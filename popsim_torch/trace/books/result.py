"""The request for a trace, and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from popsim_torch.arguments import OutputSpec
from popsim_torch.dtypes import is_continuous
from popsim_torch.host_call import HostCall
from popsim_torch.ops import PrintFormat
from popsim_torch.stages import StageAssigner
from popsim_torch.trace.books.device_loop import DeviceLoopOptimizers
from popsim_torch.trace.books.weight_steps import StepInIteration
from popsim_torch.trace.graph.bodies import Control
from popsim_torch.trace.graph.enqueues import Enqueue


@dataclass(frozen=True)
class TraceRequest:
    """A request for a trace.

    Attributes:
        module: The user's module. Its parameters and buffers are read, not changed.
        inputs: The flattened inputs of one micro-batch: shape and dtype of each.
        unflatten: Builds the arguments of forward from the same number of traced tensors.
        training: Whether to trace the backward pass of the loss too.
        stages: Knows the pipeline stage of each operation when it is called.
        module_scopes: Whether names contain the path of the calling modules.
        location_excludes: Parts of file paths; lines of such files are used as the origin of an
            operation only if there is no other line.
        back_end: The settings of the back end that are on.
        input_names: The names of the inputs in messages.
        body: Set if the module is the body of a device loop (``DeviceLoopBody``).
        replica_groups: For each parameter that differs between groups of replicas: the group of
            each replica, by name. The parameter's first axis is that of the groups, and forward
            sees the value of one.
        micro_batches: The micro-batches whose gradients the device adds up for one update.
        mean: Whether the update divides their sum by their number.
    """

    module: nn.Module
    inputs: Sequence[tuple[tuple[int, ...], torch.dtype]]
    unflatten: Callable[[list[torch.Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]
    training: bool
    stages: StageAssigner
    module_scopes: bool = True
    location_excludes: tuple[str, ...] = ()
    back_end: frozenset[str] = frozenset()
    input_names: tuple[str, ...] = ()
    body: DeviceLoopOptimizers | None = None
    replica_groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    micro_batches: int = 1
    mean: bool = True


@dataclass(frozen=True)
class PrintRequest:
    """One call of ``ipu_print_tensor``.

    Attributes:
        title: The user's title; may be empty.
        gradient_of: For the print of a gradient: the key of the print in forward.
        text_format: How to show the values.
    """

    title: str
    gradient_of: int | None
    text_format: PrintFormat


@dataclass
class TraceResult:
    """A traced module.

    Attributes:
        graph_module: The graph. Its placeholders: parameters, buffers, inputs, and the loss scale
            if gradients are computed. Its results: the outputs, then the gradients.
        parameters: The host tensor of each parameter placeholder, by name.
        buffers: The host tensor of each buffer placeholder, by name.
        num_inputs: Number of input placeholders.
        counters: Names of the integer buffers that keep the counts of forward.
        read_constants: Names of parameters and buffers whose values forward has read.
        outputs: The structure of forward's result; its number of outputs are the first results.
        gradients: Names of the parameters whose gradients are the remaining results.
        constants: Data of the ``popsim::constant`` nodes, by index.
        host_reads: The host tensors whose values forward has used, except parameters and buffers.
        host_writes: Those that forward changes in place, with values of the device.
        prints: The ``popsim::print_tensor`` nodes' requests, by key.
        host_calls: The host calls of the ``popsim::host_call`` nodes, by number.
        enqueues: The queues and elements of the ``popsim::enqueue`` nodes, by key.
        forward_of: The node whose gradient a ``popsim::mark`` node marks, by key.
        parameter_of: The parameter whose gradient the mark marks, by key.
        partial_gradients: Node of the gradient that one use of a tensor contributes, for tensors
            with several uses: by the index of the operation that uses it among all differentiable
            ones, and by its index among their operands.
        losses: Nodes of the results of loss functions.
        differentiated: Nodes of the tensors that the body of a loop calls ``backward()`` of.
        checkpoints: Nodes of values that are kept for the backward pass.
        controls: The loops and branches of the ``popsim::control`` nodes, by index.
        loss_dtypes: Dtypes of the losses that training starts from.
        overlaps: Whether an input or output is marked for overlap with computation.
        has_backward: Whether the body of a loop computes gradients.
        optimizers: The optimizers that the body of a loop steps.
        steps: The steps of the ``popsim::step`` nodes, by key: those that do not run at the end of
            an iteration.
        replica_groups: As in the request.
    """

    graph_module: torch.fx.GraphModule
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    num_inputs: int
    counters: frozenset[str] = frozenset()
    read_constants: set[str] = field(default_factory=set)
    outputs: OutputSpec = field(default_factory=lambda: OutputSpec(()))
    gradients: list[str] = field(default_factory=list)
    constants: list[torch.Tensor] = field(default_factory=list)
    host_reads: list[torch.Tensor] = field(default_factory=list)
    host_writes: list[torch.Tensor] = field(default_factory=list)
    prints: dict[int, PrintRequest] = field(default_factory=dict)
    host_calls: dict[int, HostCall] = field(default_factory=dict)
    enqueues: dict[int, Enqueue] = field(default_factory=dict)
    forward_of: dict[int, torch.fx.Node] = field(default_factory=dict)
    parameter_of: dict[int, str] = field(default_factory=dict)
    partial_gradients: dict[tuple[int, int], torch.fx.Node] = field(default_factory=dict)
    losses: list[torch.fx.Node] = field(default_factory=list)
    differentiated: list[torch.fx.Node] = field(default_factory=list)
    checkpoints: list[torch.fx.Node] = field(default_factory=list)
    controls: list[Control] = field(default_factory=list)
    loss_dtypes: list[torch.dtype] = field(default_factory=list)
    overlaps: bool = False
    has_backward: bool = False
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    steps: dict[int, StepInIteration] = field(default_factory=dict)
    replica_groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def trained(self) -> list[str]:
        """Names of the parameters that are updated."""
        in_iteration = [name for step in self.steps.values() for name in step.parameters]
        return list(dict.fromkeys([*in_iteration, *self.gradients]))

    @property
    def num_outputs(self) -> int:
        """The number of results that are outputs."""
        return len(self.outputs.names)

    def is_constant(self, name: str) -> bool:
        """Return whether a parameter or buffer is a constant of the program.

        Those of integers and booleans are constants with their present values, except counters.
        """
        host = self.parameters[name] if name in self.parameters else self.buffers[name]
        return not is_continuous(host.dtype) and name not in self.counters
