"""The compared ways to run a model: this package, eager PyTorch and torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import torch

import popsim_torch as poptorch
from benchmarks.common.cases import Case, Tensors, WithLoss

LEARNING_RATE = 0.01
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2}
"""How far the results of contenders may lie apart."""

LONGEST_CALL = 3.0
"""Seconds: cases are not measured with so many device iterations that calls take longer."""

Step = Callable[[], torch.Tensor]
"""One call: all device iterations. Returns the result that contenders are compared by."""


def make_options(device_iterations: int = 1) -> poptorch.Options:
    """Return quiet options with a number of device iterations."""
    options = poptorch.Options().showCompilationProgressBar(False)
    options.deviceIterations(device_iterations)
    return options


def make_training_model(
    case: Case, options: poptorch.Options | None = None
) -> poptorch.PoplarExecutor:
    """Wrap a case for training with SGD."""
    module = WithLoss(case.make_body_in_dtype())
    optimizer = poptorch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    return poptorch.trainingModel(module, options or make_options(), optimizer)


def our_training(case: Case, batches: Tensors, device_iterations: int) -> Step:
    """Train on the simulated IPU."""
    model = make_training_model(case, make_options(device_iterations))

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(*batches)[1]
        return loss

    return step


def eager_training(
    case: Case, batches: Tensors, device_iterations: int, *, compiled: bool = False
) -> Step:
    """Train with eager PyTorch, or with the model compiled by torch.compile."""
    module = WithLoss(case.make_body_in_dtype())
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    call = torch.compile(module) if compiled else module
    slices = _slices(case, batches)
    assert len(slices) == device_iterations

    def step() -> torch.Tensor:
        for samples, labels in slices:
            optimizer.zero_grad()
            _, loss = call(samples, labels)
            loss.backward()
            optimizer.step()
        result: torch.Tensor = loss.detach()
        return result

    return step


def our_inference(case: Case, batches: Tensors, device_iterations: int) -> Step:
    """Run the model without its loss on the simulated IPU."""
    model = poptorch.inferenceModel(
        case.make_body_in_dtype().eval(), make_options(device_iterations)
    )

    def step() -> torch.Tensor:
        logits: torch.Tensor = model(batches[0])
        return logits

    return step


def eager_inference(
    case: Case, batches: Tensors, device_iterations: int, *, compiled: bool = False
) -> Step:
    """Run the model without its loss in eager PyTorch, or compiled by torch.compile."""
    module = case.make_body_in_dtype().eval()
    call = torch.compile(module) if compiled else module
    slices = _slices(case, batches)
    assert len(slices) == device_iterations

    def step() -> torch.Tensor:
        with torch.inference_mode():
            return torch.cat([call(samples) for samples, _ in slices])

    return step


def _slices(case: Case, batches: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    samples, labels = (tensor.split(case.batch_size) for tensor in batches)
    return list(zip(samples, labels, strict=True))
