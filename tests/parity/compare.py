"""Trains a model on the device and its twin with eager PyTorch, and compares all they show."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import OutputMode, ReductionType
from tests.parity.tolerances import Tolerance

Inputs = tuple[torch.Tensor, ...]


def assert_close(ours, expected, tolerance: Tolerance, what: str = "") -> None:
    """Compare in the type that the device has."""
    expected = expected.detach()
    torch.testing.assert_close(
        ours.detach(),
        expected.to(ours.dtype) if expected.is_floating_point() else expected,
        **tolerance.of(expected.float()),
        msg=lambda text: f"{what}: {text}",
    )


def quiet_options(seed: int | None = None) -> poptorch.Options:
    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    if seed is not None:
        options.randomSeed(seed)
    return options


@dataclass(frozen=True)
class Loop:
    """How often a call runs the model, and how its gradients are combined."""

    device_iterations: int = 1
    accumulation: int = 1
    reduction: ReductionType = ReductionType.Mean

    @property
    def micro_batches(self) -> int:
        return self.device_iterations * self.accumulation

    def options(self) -> poptorch.Options:
        options = quiet_options()
        options.deviceIterations(self.device_iterations)
        options.Training.gradientAccumulation(self.accumulation)
        options.Training.accumulationAndReplicationReductionType(self.reduction)
        return options

    def __str__(self) -> str:
        return f"D{self.device_iterations}-GA{self.accumulation}-{self.reduction.name}"


@dataclass
class EagerCall:
    """What one call computes, a list entry per micro-batch."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)


class EagerTrainer:
    """The loop that a training call stands for, in eager PyTorch.

    Args:
        model: Returns output and loss.
        optimizer: Of the model's parameters.
        loop: Dimension 0 of the inputs is device iteration, accumulation step, micro-batch.
        max_grad_norm: Gradients are clipped to it before each update.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loop: Loop,
        max_grad_norm: float | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._loop = loop
        self._max_grad_norm = max_grad_norm

    def __call__(self, *inputs: torch.Tensor) -> EagerCall:
        call = EagerCall()
        micro_batches = zip(*(x.chunk(self._loop.micro_batches) for x in inputs), strict=True)
        for _ in range(self._loop.device_iterations):
            for _ in range(self._loop.accumulation):
                self._micro_batch(next(micro_batches), call)
            self._update(call.gradients[-self._loop.accumulation :])
        return call

    def _micro_batch(self, inputs: Inputs, call: EagerCall) -> None:
        self.optimizer.zero_grad()
        output, loss = self.model(*inputs)
        loss.backward()
        call.outputs.append(output.detach())
        call.losses.append(loss.detach())
        call.gradients.append(
            {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        )

    def _update(self, gradients: Sequence[Mapping[str, torch.Tensor]]) -> None:
        divisor = self._loop.accumulation if self._loop.reduction == ReductionType.Mean else 1
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                parameter.grad = sum(g[name] for g in gradients) / divisor
        if self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        self.optimizer.step()


class Pair:
    """A model on the device and its twin in eager PyTorch.

    Args:
        model: Returns output and loss. Trained by the device; the twin is a copy.
        optimizer: Makes the device's optimizer for a model.
        reference: Makes the twin's; None: the same.
        loop: How often a call runs the model.
        tolerance: For every comparison.
        max_grad_norm: What the twin's gradients are clipped to.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        reference: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        *,
        tolerance: Tolerance,
        loop: Loop | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self.model = model
        self.twin = copy.deepcopy(model)
        self.loop = loop or Loop()
        self.optimizer = optimizer(model)
        self._tolerance = tolerance
        self._scale = getattr(self.optimizer, "loss_scaling", 1.0)
        eager_optimizer = (reference or optimizer)(self.twin)
        self.eager = EagerTrainer(self.twin, eager_optimizer, self.loop, max_grad_norm)
        options = self.loop.options()
        options.outputMode(OutputMode.All)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                options.anchorTensor(f"{name} all", f"Gradient___{name}", OutputMode.All)
                options.anchorTensor(f"{name} final", f"Gradient___{name}", OutputMode.Final)
        self.device = poptorch.trainingModel(model, options, self.optimizer)

    def step(self, *inputs: torch.Tensor) -> None:
        """Call both with the same inputs, and compare outputs, losses and gradients."""
        output, loss = self.device(*(x.clone() for x in inputs))
        call = self.eager(*inputs)
        self._compare("output", output, torch.cat(call.outputs))
        losses = torch.stack(call.losses)
        self._compare("loss", loss, losses if self.loop.micro_batches > 1 else losses[0])
        for name, final in call.gradients[-1].items():
            every = [g[name] if g[name].dim() else g[name][None] for g in call.gradients]
            ours = self.device.getAnchoredTensor(f"{name} all")
            self._compare(f"gradients of {name}", ours, torch.cat(every) * self._scale)
            ours = self.device.getAnchoredTensor(f"{name} final")
            self._compare(f"last gradient of {name}", ours, final * self._scale)

    def finish(self) -> None:
        """Compare parameters and buffers, as reads of the wrapped model give them."""
        self.device.copyWeightsToHost()
        ours = self.model.state_dict()
        for name, expected in self.twin.state_dict().items():
            # Integer buffers are constants on the device.
            if expected.is_floating_point():
                self._compare(name, ours[name], expected)

    def _compare(self, what: str, ours: torch.Tensor, expected: torch.Tensor) -> None:
        assert_close(ours, expected, self._tolerance, what)
