"""Runs a function inside of a model, in inference and in training, against eager PyTorch."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import popsim_torch as poptorch
from tests.parity.compare import assert_close, quiet_options
from tests.parity.tolerances import ONE_PASS

LEARNING_RATE = 0.25
TOLERANCE = ONE_PASS[torch.float32]
KINDS = ("inference", "training")


class Calls(nn.Module):
    """Calls ``function(self, x)``; in training, everything it returns counts in the loss.

    Attributes:
        fc: A linear layer, 4 to 3.
        host: A tensor of the host.
        sizes: A buffer of integers.
        mask: A buffer of booleans.
    """

    def __init__(self, function, training: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.host = torch.arange(1.0, 5.0)
        self.register_buffer("sizes", torch.tensor([1, 3]))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self._function, self._training = function, training

    def forward(self, x):
        results = [torch.as_tensor(r) for r in tree_leaves(self._function(self, x))]
        if not self._training:
            return results
        loss = self.fc(x).square().sum()
        for number, result in enumerate(results):
            loss = loss + (number + 1) * result.float().sin().sum()
        return results, poptorch.identity_loss(loss, "none")


def compare_with_eager(function, kind: str, *inputs: torch.Tensor) -> None:
    """Compare results and, in training, updated weights.

    Args:
        function: Called with the model and the inputs; returns tensors.
        kind: One of ``KINDS``.
        inputs: What the model is called with; None for one of shape (2, 4).
    """
    inputs = inputs or (torch.rand(2, 4),)
    model = Calls(function, kind == "training")
    twin = copy.deepcopy(model)
    host = model.host.clone()
    if kind == "inference":
        device = poptorch.inferenceModel(model, quiet_options())
        _compare(device(*inputs), twin(*inputs))
    else:
        optimizer = poptorch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        device = poptorch.trainingModel(model, quiet_options(), optimizer)
        results, loss = device(*inputs)
        expected, eager_loss = twin(*inputs)
        _compare(results, expected)
        assert_close(loss, eager_loss, TOLERANCE, "loss")
        eager_loss.backward()
        device.copyWeightsToHost()
        for name, parameter in twin.named_parameters():
            updated = parameter - LEARNING_RATE * parameter.grad
            assert_close(model.get_parameter(name), updated, TOLERANCE, name)
    assert torch.equal(model.host, host)


def _compare(results, expected) -> None:
    assert len(results) == len(expected)
    for number, (ours, eager) in enumerate(zip(results, expected, strict=True)):
        assert_close(ours, eager, TOLERANCE, f"result {number}")


def in_both(functions):
    """Parametrize a test with ``function`` and ``kind``.

    Args:
        functions: The functions by name.
    """

    def decorate(test):
        test = pytest.mark.parametrize("function", functions.values(), ids=functions)(test)
        return pytest.mark.parametrize("kind", KINDS)(test)

    return decorate
