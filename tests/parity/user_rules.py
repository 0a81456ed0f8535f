"""Small programs in a user's words, trained on the device and in eager PyTorch."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.parity.compare import assert_close, quiet_options
from tests.parity.tolerances import TRAINED, Tolerance

Forward = Callable[[Any, torch.Tensor], Any]
STEPS = 3


class Net(nn.Module):
    """A model whose forward is a function of the model and its input.

    Args:
        function: Gets the model and the input; returns a tensor or several.
        prepare: Adds to the model before it is trained.
    """

    def __init__(self, function: Forward, prepare: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.fc = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.randn(4))
        self.register_buffer("kept", torch.randn(4))
        if prepare is not None:
            prepare(self)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the loss, then the results of the function."""
        results = self.function(self, x)
        results = results if isinstance(results, tuple) else (results,)
        loss = sum(
            (one * one.detach().cos()).sum() + one.square().mean()
            for one in (r.float() if r.dtype == torch.float16 else r for r in results)
            if one.is_floating_point()
        )
        return poptorch.identity_loss(loss, reduction="none"), *results


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that leaves a parameter alone only if it has no gradient."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5, weight_decay=0.01)


def batches(steps: int = STEPS) -> list[torch.Tensor]:
    """Return an input for each step."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(5, 4, generator=generator) for _ in range(steps)]


def compare_training(
    function: Forward,
    prepare: Callable[[Any], None] | None = None,
    tolerance: Tolerance = TRAINED[torch.float32],
    wide: bool = False,
) -> poptorch.PoplarExecutor:
    """Train a program here and in eager PyTorch; compare losses, results, gradients, weights.

    Args:
        function: The body of forward.
        prepare: Adds to the model.
        tolerance: For every comparison.
        wide: Whether eager PyTorch computes in float64.

    Returns:
        The executor of the program.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.nn.utils.weight_norm` is deprecated")
        twin, model = Net(function, prepare), Net(function, prepare)
    dtype = torch.float64 if wide else torch.float32
    twin.to(dtype)
    optimizer, steps = momentum(twin), []
    for x in batches():
        optimizer.zero_grad()
        results = twin(x.to(dtype, copy=True))
        results[0].backward()
        found = {n: p.grad.clone() for n, p in twin.named_parameters() if p.grad is not None}
        steps.append(([one.detach().clone() for one in results], found))
        optimizer.step()
    options = quiet_options()
    for name in steps[0][1]:
        options.anchorTensor(name, f"Gradient___{name}")
    executor = poptorch.trainingModel(model, options, momentum(model))
    for step, (x, (results, gradients)) in enumerate(zip(batches(), steps, strict=True)):
        ours = executor(x)
        assert len(ours) == len(results)
        for i, (mine, expected) in enumerate(zip(ours, results, strict=True)):
            if expected.dtype == torch.int64:
                expected = expected.int()
            assert wide or mine.dtype == expected.dtype, f"result {i}"
            assert_close(mine, expected, tolerance, f"result {i} of step {step}")
        for name, gradient in gradients.items():
            mine = executor.getAnchoredTensor(name)
            assert_close(mine, gradient, tolerance, f"gradient of {name} in step {step}")
    ours, expected_state = model.state_dict(), twin.state_dict()
    assert ours.keys() == expected_state.keys()
    for name, expected in expected_state.items():
        if expected.is_floating_point():
            assert_close(ours[name], expected, tolerance, name)
    return executor


def refusal(function: Forward, prepare: Callable[[Any], None] | None = None) -> tuple[str, str]:
    """Return the messages of the errors in eager PyTorch and here."""
    x = batches()[0]
    with pytest.raises(Exception) as eager:
        Net(function, prepare)(x)[0].backward()
    model = Net(function, prepare)
    with pytest.raises(Exception) as ours:
        poptorch.trainingModel(model, quiet_options(), momentum(model))(x)
    return str(eager.value), str(ours.value)
