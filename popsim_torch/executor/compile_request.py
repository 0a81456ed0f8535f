"""The request to compile: a model with the arguments of a call, or the body of a device loop.

The steps of a compilation ask the request for all they need; they never ask for its type.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from popsim_torch import _native
from popsim_torch.arguments import ArgumentSpec
from popsim_torch.executor.gradient_captures import device_loop_captures
from popsim_torch.executor.interface import (
    Interface,
    interface_of_call,
    interface_of_device_loop,
    loop_counts,
)
from popsim_torch.executor.queues import Queues
from popsim_torch.executor.updates import device_loop_plan, make_plan
from popsim_torch.feeds import InfeedQueue
from popsim_torch.ir import LoopCounts
from popsim_torch.optim.captures import GradientCapture
from popsim_torch.optim.plan import OptimizerPlan
from popsim_torch.optim.planning import OptimizerSettings
from popsim_torch.options import Options
from popsim_torch.profiling import Channel
from popsim_torch.trace import TraceResult
from popsim_torch.trace.books.device_loop import DeviceLoopOptimizers
from popsim_torch.trace.graph.enqueues import Enqueue

__all__ = ["CompileRequest", "DeviceLoopRequest", "ModelRequest"]


@dataclass(frozen=True)
class CompileRequest(ABC):
    """A model or a body to compile.

    Attributes:
        module: The module to trace.
        options: The options, with a resolved output mode.
        warned: The warnings that were already given.
        channel: Shows the trace of the module in PopVision.
        body: The properties of a loop body; None for a model.
        fed: Whether inputs come from queues.
        replica_groups: The group of each replica, by the name of the parameter that has a value for
            each group.
        needs_values: Whether the model's tensors must have values; those on the device ``meta``
            have none.
    """

    module: nn.Module
    options: Options
    channel: Channel
    warned: set[str] = field(default_factory=set, kw_only=True)
    body: DeviceLoopOptimizers | None = field(default=None, kw_only=True)
    replica_groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict, kw_only=True)
    needs_values: bool = field(default=True, kw_only=True)

    @property
    def fed(self) -> bool:
        """Whether inputs come from queues."""
        return False

    @property
    @abstractmethod
    def may_train(self) -> bool:
        """Whether the program may ask for gradients."""

    @abstractmethod
    def interface(self) -> Interface:
        """Return the description of calls of the program.

        Raises:
            Error: The arguments do not fit the model, or a count is out of range.
        """

    @abstractmethod
    def trains(self, traced: TraceResult) -> bool:
        """Return whether the program trains; known after the trace."""

    @abstractmethod
    def plan(self, traced: TraceResult, loss_scale: str) -> OptimizerPlan | None:
        """Return the updates that optimizers apply to the weights; None if nothing is trained."""

    @abstractmethod
    def captures(self, traced: TraceResult) -> Sequence[GradientCapture]:
        """Return the gradients that go into queues."""

    @abstractmethod
    def queues(self, enqueues: Mapping[int, Enqueue]) -> Queues | None:
        """Return the queues of the program; None if it has no queues.

        Args:
            enqueues: The tensors that the program puts into queues, by number.
        """


@dataclass(frozen=True)
class ModelRequest(CompileRequest):
    """A model, and the call for which it is compiled.

    Attributes:
        args: The call's positional arguments.
        kwargs: Its keyword arguments.
        optimizer: The optimizer for training; None for inference.
        gradient_captures: The gradients that go into queues.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    optimizer: OptimizerSettings | None
    gradient_captures: Sequence[GradientCapture] = ()

    @property
    def may_train(self) -> bool:
        """Whether the model is wrapped for training."""
        return self.optimizer is not None

    def interface(self) -> Interface:
        """Return the description of calls that are like this one."""
        signature = inspect.signature(self.module.forward)
        arguments = ArgumentSpec(
            signature,
            self.args,
            self.kwargs,
            warned=self.warned,
            needs_values=self.needs_values,
        )
        return interface_of_call(arguments, loop_counts(self.options, training=self.may_train))

    def trains(self, traced: TraceResult) -> bool:
        """Return whether the model is wrapped for training."""
        return self.may_train

    def plan(self, traced: TraceResult, loss_scale: str) -> OptimizerPlan | None:
        """Return the updates of the optimizer."""
        if self.optimizer is None:
            return None
        return make_plan(self.optimizer, self.options, self.module, traced.gradients, loss_scale)

    def captures(self, traced: TraceResult) -> Sequence[GradientCapture]:
        """Return the gradients that the user asked for when the model was wrapped."""
        return self.gradient_captures

    def queues(self, enqueues: Mapping[int, Enqueue]) -> Queues | None:
        """Return the queues that forward and the optimizer feed."""
        return Queues(enqueues) if enqueues else None


@dataclass(frozen=True)
class DeviceLoopRequest(CompileRequest):
    """A device loop: its body, the number of its iterations, and the sources of its inputs.

    Attributes:
        counts: How often the body runs.
        inputs: Shape and dtype of each input of an iteration.
        input_names: The names of the inputs in messages.
        infeeds: The queues that feed inputs.
        places: The source of each input.
        read_optimizer: Copies the values of an optimizer.
        iterations: Number of iterations in a run; None if the body decides.
    """

    counts: LoopCounts
    inputs: Sequence[tuple[tuple[int, ...], torch.dtype]]
    input_names: tuple[str, ...]
    infeeds: Sequence[InfeedQueue]
    places: Sequence[_native.InputPlace]
    read_optimizer: Callable[[torch.optim.Optimizer], OptimizerSettings]
    iterations: int | None = field(default=None, kw_only=True)

    @property
    def fed(self) -> bool:
        """Whether the loop has infeed queues."""
        return bool(self.infeeds)

    @property
    def may_train(self) -> bool:
        """Return True: only the trace of the body tells whether it trains."""
        return True

    def interface(self) -> Interface:
        """Return the description of the inputs of an iteration."""
        return interface_of_device_loop(self.module, self.inputs, self.counts, self.warned)

    def trains(self, traced: TraceResult) -> bool:
        """Return whether the body computes gradients."""
        return traced.has_backward

    def plan(self, traced: TraceResult, loss_scale: str) -> OptimizerPlan | None:
        """Return the updates of the optimizers that the body steps, with their present values."""
        settings = [self.read_optimizer(one) for one in traced.optimizers]
        return device_loop_plan(settings, self.options, self.module, traced, loss_scale)

    def captures(self, traced: TraceResult) -> Sequence[GradientCapture]:
        """Return the gradients that those optimizers capture."""
        return device_loop_captures(traced.optimizers)

    def queues(self, enqueues: Mapping[int, Enqueue]) -> Queues | None:
        """Return the queues that the body feeds, and the queues that feed the body."""
        elements = None if self.iterations is None else self.iterations * self.counts.num_inputs
        return Queues(enqueues, self.infeeds, self.places, elements)
