"""What tracing is asked for, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from popsim_torch.arguments import OutputSpec
from popsim_torch.host_call import HostCall
from popsim_torch.ops import PrintFormat
from popsim_torch.stages import StageAssigner
from popsim_torch.trace.books.device_loop import DeviceLoopOptimizers
from popsim_torch.trace.books.weight_steps import StepInIteration
from popsim_torch.trace.graph.bodies import Control
from popsim_torch.trace.graph.enqueues import Enqueue


@dataclass(frozen=True)
class TraceRequest:
    """What to trace.

    Attributes:
        module: The user's module. Its parameters and buffers are looked at, not changed.
        inputs: The flattened inputs of one micro-batch: shape and element type of each.
        unflatten: Builds the arguments of forward from as many traced tensors.
        training: Trace the backward pass of the loss too.
        stages: Tells the pipeline stage of the operations as they are called.
        module_scopes: Names carry the path of the modules being called.
        location_excludes: Pieces of paths of files whose lines are not given as where an operation
            comes from, unless there is no other line.
        back_end: The settings of the back end that are on.
        input_names: What messages call the inputs.
        body: Set where the module is the body of a device loop (``DeviceLoopBody``).
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


@dataclass(frozen=True)
class PrintRequest:
    """One ``ipu_print_tensor``.

    Attributes:
        title: What the user gave, maybe empty.
        gradient_of: For the print of a gradient: the key of the print it comes back to.
        text_format: How to show the values.
    """

    title: str
    gradient_of: int | None
    text_format: PrintFormat


@dataclass
class TraceResult:
    """A traced module.

    Attributes:
        graph_module: Placeholders: parameters, buffers, inputs, and the loss scale where gradients
            are computed.
            Results: the outputs, then the gradients.
        parameters: Host tensor of each parameter placeholder, by name.
        buffers: The same of each buffer placeholder.
        num_inputs: Number of input placeholders.
        counters: Names of the integer buffers that keep what forward counts in them.
        read_constants: Names of parameters and buffers that forward took values from.
        outputs: What forward returned; as many results are outputs as it names.
        gradients: Names of the parameters that the remaining results are gradients of.
        constants: Data of the ``popsim::constant`` nodes, by index.
        prints: The ``popsim::print_tensor`` nodes' requests, by key.
        host_calls: What the ``popsim::host_call`` nodes call, by number.
        enqueues: What the ``popsim::enqueue`` nodes put into queues, by key.
        forward_of: The node whose gradient a ``popsim::mark`` node is, by key.
        parameter_of: The parameter whose gradient it is, by key.
        partial_gradients: Node of what one use of a tensor adds to its gradient, where there are
            several: by the position of the operation that uses it among all differentiable ones,
            and by its position among their operands.
        losses: Nodes of the results of loss functions.
        checkpoints: Nodes of values that are kept for the backward pass.
        controls: What the ``popsim::control`` nodes repeat or choose from, by index.
        loss_dtypes: Element types of the losses that training starts from.
        overlaps: Whether an input or output is marked for overlap with computation.
        has_backward: Whether the body of a loop computes gradients.
        optimizers: Those that the body of a loop steps.
        steps: What the ``popsim::step`` nodes change, by key: the steps that are not taken at the
            end of an iteration.
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
    prints: dict[int, PrintRequest] = field(default_factory=dict)
    host_calls: dict[int, HostCall] = field(default_factory=dict)
    enqueues: dict[int, Enqueue] = field(default_factory=dict)
    forward_of: dict[int, torch.fx.Node] = field(default_factory=dict)
    parameter_of: dict[int, str] = field(default_factory=dict)
    partial_gradients: dict[tuple[int, int], torch.fx.Node] = field(default_factory=dict)
    losses: list[torch.fx.Node] = field(default_factory=list)
    checkpoints: list[torch.fx.Node] = field(default_factory=list)
    controls: list[Control] = field(default_factory=list)
    loss_dtypes: list[torch.dtype] = field(default_factory=list)
    overlaps: bool = False
    has_backward: bool = False
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    steps: dict[int, StepInIteration] = field(default_factory=dict)

    @property
    def trained(self) -> list[str]:
        """Names of the parameters that are updated."""
        in_iteration = [name for step in self.steps.values() for name in step.parameters]
        return list(dict.fromkeys([*in_iteration, *self.gradients]))

    @property
    def num_outputs(self) -> int:
        """How many results are outputs."""
        return len(self.outputs.names)

    def is_constant(self, name: str) -> bool:
        """Whether a parameter or buffer is one of the program's constants, of its value now.

        Those of integers and booleans are, but for counters.
        """
        host = self.parameters[name] if name in self.parameters else self.buffers[name]
        return not host.dtype.is_floating_point and name not in self.counters
