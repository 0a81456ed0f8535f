"""``Executable.profile``: a time per op, from ordinary runs."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import _native
from popsim_torch.errors import Error
from popsim_torch.ir import Phase


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x, y):
        return poptorch.identity_loss((self.fc(x) - y) ** 2, "mean")


def make_model(device_iterations, accumulation):
    options = poptorch.Options().showCompilationProgressBar(False)
    options.deviceIterations(device_iterations)
    options.Training.gradientAccumulation(accumulation)
    torch.manual_seed(1)
    module = Regression()
    optimizer = poptorch.optim.SGD(module.parameters(), lr=0.1)
    model = poptorch.trainingModel(module, options, optimizer)
    batch = 2 * device_iterations * accumulation
    inputs = [torch.randn(batch, 6), torch.randn(batch, 3)]
    model.compile(*inputs)
    return module, model, inputs


def test_every_op_that_runs_has_a_time_and_the_number_of_its_executions() -> None:
    _, model, inputs = make_model(device_iterations=3, accumulation=2)
    graph = model.compiled.host_program.graph
    times = model.compiled.executable.profile(inputs, 4)
    expected = {
        position: 3 if op.phase == Phase.UPDATE else 6
        for position, op in enumerate(graph.ops)
        if op.phase != Phase.SETUP
    }
    assert {time.op: time.executions for time in times} == expected
    assert all(0 < time.seconds < 1 for time in times)


def test_profiling_trains_as_many_calls_would() -> None:
    module, model, inputs = make_model(device_iterations=2, accumulation=1)
    other_module, other_model, _ = make_model(device_iterations=2, accumulation=1)
    model.compiled.executable.profile(inputs, 3)
    for _ in range(3):
        other_model(*inputs)
    model.copyWeightsToHost()
    assert torch.equal(module.fc.weight, other_module.fc.weight)
    assert torch.equal(model(*inputs), other_model(*inputs))


def test_repeats_must_be_positive() -> None:
    _, model, inputs = make_model(1, 1)
    with (
        pytest.raises(Error, match=r"profile: repeats must be at least 1, got 0"),
        _native.translated_errors(),
    ):
        model.compiled.executable.profile(inputs, 0)
