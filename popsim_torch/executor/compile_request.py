"""What is compiled: a model with the arguments of a call, or the body of a device loop.

The steps of a compilation ask a request what they need to know and never which of the two it is.
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
    """What to compile.

    Attributes:
        module: What is traced.
        options: With a resolved output mode.
        warned: Warnings already given.
        channel: Shows the trace of the module.
        body: What is known of the body of a loop; None for a model.
        fed: Whether inputs come from queues.
    """

    module: nn.Module
    options: Options
    channel: Channel
    warned: set[str] = field(default_factory=set, kw_only=True)
    body: DeviceLoopOptimizers | None = field(default=None, kw_only=True)

    @property
    def fed(self) -> bool:
        """Whether inputs come from queues."""
        return False

    @property
    @abstractmethod
    def may_train(self) -> bool:
        """Whether gradients may be asked for."""

    @abstractmethod
    def interface(self) -> Interface:
        """Return what calls of the program look like.

        Raises:
            Error: The arguments cannot be those of a model, or a count is out of range.
        """

    @abstractmethod
    def trains(self, traced: TraceResult) -> bool:
        """Return whether the program trains, now that it is traced."""

    @abstractmethod
    def plan(self, traced: TraceResult, loss_scale: str) -> OptimizerPlan | None:
        """Return what optimizers do to the weights; None if nothing is trained."""

    @abstractmethod
    def captures(self, traced: TraceResult) -> Sequence[GradientCapture]:
        """Return the gradients that go into queues."""

    @abstractmethod
    def queues(self, enqueues: Mapping[int, Enqueue]) -> Queues | None:
        """Return the queues of the program; None if it has none.

        Args:
            enqueues: What it puts into queues, by number.
        """


@dataclass(frozen=True)
class ModelRequest(CompileRequest):
    """A model, and the call that it is compiled for.

    Attributes:
        args: The call's positional arguments.
        kwargs: Its keyword arguments.
        optimizer: For training; None for inference.
        gradient_captures: Gradients that go into queues.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    optimizer: OptimizerSettings | None
    gradient_captures: Sequence[GradientCapture] = ()

    @property
    def may_train(self) -> bool:
        """Whether it is for training."""
        return self.optimizer is not None

    def interface(self) -> Interface:
        """Return what calls look like, after this one."""
        signature = inspect.signature(self.module.forward)
        arguments = ArgumentSpec(signature, self.args, self.kwargs, warned=self.warned)
        return interface_of_call(arguments, loop_counts(self.options, training=self.may_train))

    def trains(self, traced: TraceResult) -> bool:
        """Return whether it is for training."""
        return self.may_train

    def plan(self, traced: TraceResult, loss_scale: str) -> OptimizerPlan | None:
        """Return what the optimizer does."""
        if self.optimizer is None:
            return None
        return make_plan(self.optimizer, self.options, self.module, traced.gradients, loss_scale)

    def captures(self, traced: TraceResult) -> Sequence[GradientCapture]:
        """Return what was asked for where the model was wrapped."""
        return self.gradient_captures

    def queues(self, enqueues: Mapping[int, Enqueue]) -> Queues | None:
        """Return the queues that forward and the optimizer feed."""
        return Queues(enqueues) if enqueues else None


@dataclass(frozen=True)
class DeviceLoopRequest(CompileRequest):
    """A device loop: what it repeats, how often, and where its inputs come from.

    Attributes:
        counts: How often the body runs.
        inputs: Shape and element type of each input of an iteration.
        input_names: What messages call them.
        infeeds: The queues that inputs come from.
        places: Where each input comes from.
        read_optimizer: Copies an optimizer's values.
        iterations: How many there are in a run (count); None if the body decides that.
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
        """Whether there are infeed queues."""
        return bool(self.infeeds)

    @property
    def may_train(self) -> bool:
        """The body says so while it is traced."""
        return True

    def interface(self) -> Interface:
        """Return what an iteration is given."""
        return interface_of_device_loop(self.module, self.inputs, self.counts, self.warned)

    def trains(self, traced: TraceResult) -> bool:
        """Return whether the body computes gradients."""
        return traced.has_backward

    def plan(self, traced: TraceResult, loss_scale: str) -> OptimizerPlan | None:
        """Return what the optimizers do that the body steps, with the values that they have now."""
        settings = [self.read_optimizer(one) for one in traced.optimizers]
        return device_loop_plan(settings, self.options, self.module, traced, loss_scale)

    def captures(self, traced: TraceResult) -> Sequence[GradientCapture]:
        """Return what those optimizers capture."""
        return device_loop_captures(traced.optimizers)

    def queues(self, enqueues: Mapping[int, Enqueue]) -> Queues | None:
        """Return the queues that the body feeds and is fed from."""
        return Queues(enqueues, self.infeeds, self.places, self.iterations)
