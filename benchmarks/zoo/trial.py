"""Trains an entry here and in eager PyTorch, and compares what comes out.

A model with kinks (ReLU, max pooling) may go another way after one rounding: a number that is
nearly zero has a gradient or not. So if our results seem worse than those of eager PyTorch, it
trains again from weights that are moved by about a rounding, and its worst error counts.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

import popsim_torch as poptorch
from benchmarks.zoo.entry import Batch, Entry, loss_of
from popsim_torch import ir

LOSS_FLOOR = 1e-5
"""Relative error of a loss that float32 always may have."""
WEIGHT_FLOOR = 1e-4
"""The same of the change of the weights."""
SLACK = 5.0
"""How many times the error of eager PyTorch in float32 is still an error of float32."""
NOISE = 1e-6
"""Relative change of weights that float32 cannot tell from rounding after some layers."""
NOISY_RUNS = 10


@dataclass(frozen=True)
class Errors:
    """Distances of a training from the same one in float64.

    Attributes:
        loss: The largest relative distance of the losses of all steps.
        weights: The norm of the distance of all weights and buffers at the end, divided by the norm
            of their change since the beginning.
        first: The same after the first step. Steps of small batches make any error larger; this
            one is still as small as the ops make it.
    """

    loss: float
    weights: float
    first: float


@dataclass(frozen=True)
class Trial:
    """A training here, and one in eager PyTorch.

    Attributes:
        ours: Errors of this package.
        eager: Errors of eager PyTorch in float32: the largest of all runs that were needed.
        ops: Number of ops of the program.
        parameters: Number of elements that are trained.
        steps: Number of steps.
        compile_seconds: Processor time from the model to the program that can run.
    """

    ours: Errors
    eager: Errors
    ops: int
    parameters: int
    steps: int
    compile_seconds: float

    def beside(self, noisy: Errors) -> Trial:
        """Return the same trial beside a worse run of eager PyTorch."""
        worse = Errors(
            max(self.eager.loss, noisy.loss),
            max(self.eager.weights, noisy.weights),
            max(self.eager.first, noisy.first),
        )
        return replace(self, eager=worse)

    def complaint(self) -> str:
        """Return what is wrong with our results; nothing if they are as good as float32."""
        for what, ours, eager, floor in (
            ("losses", self.ours.loss, self.eager.loss, LOSS_FLOOR),
            ("weights", self.ours.weights, self.eager.weights, WEIGHT_FLOOR),
            ("weights after a step", self.ours.first, self.eager.first, WEIGHT_FLOOR),
        ):
            if not ours <= max(floor, SLACK * eager):  # also if it is not a number
                return f"error of the {what}: {ours:.1e}, of eager PyTorch {eager:.1e}"
        return ""


class Eager:
    """A model that eager PyTorch trains.

    Args:
        model: The model; it is trained in its dtype.
        learning_rate: Of SGD.
    """

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        self.model = model
        self._optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
        self._dtype = next(model.parameters()).dtype

    def step(self, batch: Batch) -> torch.Tensor:
        """Train one step and return its loss."""
        inputs = {k: v.to(self._dtype) if v.is_floating_point() else v for k, v in batch.items()}
        self._optimizer.zero_grad()
        loss = loss_of(self.model(**inputs))
        loss.backward()
        self._optimizer.step()
        return loss.detach()


def wrap(entry: Entry, model: nn.Module) -> poptorch.PoplarExecutor:
    """Return an executor that trains a model of an entry."""
    options = poptorch.Options().showCompilationProgressBar(False)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=entry.learning_rate)
    return poptorch.trainingModel(model, options, optimizer)


def try_out(entry: Entry, steps: int | None = None) -> tuple[Trial, poptorch.PoplarExecutor, Eager]:
    """Train some steps in all ways.

    Args:
        entry: What to train.
        steps: The number of steps; None for that of the entry.

    Returns:
        The comparison, and the two contenders in float32, which can train on.
    """
    model = entry.model()
    eager = Eager(copy.deepcopy(model), entry.learning_rate)
    comparison = _Comparison(entry, model, steps or entry.steps)
    start = time.process_time()
    executor = wrap(entry, model)
    executor.compile(**comparison.batches[0])
    compile_seconds = time.process_time() - start
    theirs = comparison.errors(eager.step, eager.model)
    ours = comparison.errors(lambda batch: loss_of(executor(**batch)), executor.model)
    trial = Trial(
        ours,
        theirs,
        sum(1 for _ in ir.walk_all(executor.compiled.program.graph)),
        sum(p.numel() for p in model.parameters()),
        len(comparison.batches),
        compile_seconds,
    )
    for seed in range(NOISY_RUNS):
        if not trial.complaint():
            break
        noisy = Eager(_moved(entry.model(), seed), entry.learning_rate)
        trial = trial.beside(comparison.errors(noisy.step, noisy.model))
    return trial, executor, eager


class _Comparison:
    """A training in float64, and the distances of others from it.

    Args:
        entry: What is trained.
        model: The model before the training.
        steps: The number of steps.
    """

    def __init__(self, entry: Entry, model: nn.Module, steps: int) -> None:
        self.batches = entry.batches(steps)
        self._before = _numbers(model)
        wide = Eager(copy.deepcopy(model).double(), entry.learning_rate)
        self._losses, self._first, self._end = self._train(wide.step, wide.model)

    def errors(self, step: Callable[[Batch], torch.Tensor], model: nn.Module) -> Errors:
        """Train a model and return its errors.

        Args:
            step: Trains one step and returns the loss.
            model: The model that is trained.
        """
        losses, first, end = self._train(step, model)
        pairs = zip(losses, self._losses, strict=True)
        return Errors(
            max(abs(loss - expected) / abs(expected) for loss, expected in pairs),
            self._distance(end, self._end),
            self._distance(first, self._first),
        )

    def _train(
        self, step: Callable[[Batch], torch.Tensor], model: nn.Module
    ) -> tuple[list[float], torch.Tensor, torch.Tensor]:
        """Return the losses, and the weights after the first and the last step."""
        losses = [float(step(self.batches[0]))]
        first = _numbers(model)
        losses += [float(step(batch)) for batch in self.batches[1:]]
        return losses, first, _numbers(model)

    def _distance(self, weights: torch.Tensor, expected: torch.Tensor) -> float:
        return float((weights - expected).norm() / (expected - self._before).norm())


def _moved(model: nn.Module, seed: int) -> nn.Module:
    """Move all weights by what a few roundings may amount to."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.rand(parameter.shape, generator=generator) - 0.5
            parameter *= 1 + 2 * NOISE * noise
    return model


def _numbers(model: nn.Module) -> torch.Tensor:
    """Return all weights, and buffers that training changes, as one vector in float64."""
    state = [t for t in model.state_dict().values() if t.is_floating_point()]
    return torch.cat([tensor.detach().double().flatten() for tensor in state])
