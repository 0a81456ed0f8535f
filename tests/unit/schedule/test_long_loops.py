"""Programs that run a model very often: compiled like programs that run it a few times."""

import time
from pathlib import Path

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import OutputMode

PAGE = 4096  # bytes


class Net(nn.Module):
    """Two layers, on the requested stages; the loss is used in training."""

    def __init__(self, stages=(0, 0)):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 2)
        self._stages = stages

    def forward(self, x):
        poptorch.Block.start(ipu_id=self._stages[0])
        x = torch.tanh(self.first(x))
        poptorch.Block.start(ipu_id=self._stages[1])
        x = self.second(x)
        return x, poptorch.identity_loss((x**2).mean(), "none")


def make_model(stages, training, count):
    """Return an executor that processes ``count`` micro-batches of one sample in one run."""
    options = poptorch.Options().showCompilationProgressBar(False)
    options.outputMode(OutputMode.Final)
    if not training:
        options.deviceIterations(count)
        return poptorch.inferenceModel(Net(stages), options)
    options.Training.gradientAccumulation(count)
    net = Net(stages)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
    return poptorch.trainingModel(net, options, optimizer)


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def compiling(*args):
    """Return the time of a compilation (s), and the increase of memory (bytes)."""
    model = make_model(*args)
    x = torch.zeros(1, 2).expand(args[-1], 2)
    before, start = resident(), time.perf_counter()
    model.compile(x)
    return time.perf_counter() - start, resident() - before


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("stages", [(0, 0), (0, 1)])
def test_compiling_a_very_long_loop_takes_what_a_short_one_takes(stages, training):
    compiling(stages, training, 10)  # includes the one-time work of a first compilation
    short_seconds = min(compiling(stages, training, 10)[0] for _ in range(3))
    long_ones = [compiling(stages, training, 10**7) for _ in range(3)]
    seconds, size = min(long_ones)[0], long_ones[0][1]
    assert seconds < 3 * short_seconds + 0.1
    assert size < 10e6


@pytest.mark.parametrize("stages", [(0, 0), (0, 1)])
def test_every_micro_batch_of_a_long_loop_runs_once(stages):
    """The loop is so long that its schedule has a repeated stretch."""
    count = 3000
    options = poptorch.Options().showCompilationProgressBar(False).deviceIterations(count)
    net = Net(stages).eval()
    model = poptorch.inferenceModel(net, options)
    x = torch.randn(count, 2)
    out, _ = model(x)
    assert "(" in model.compiled.executable.actions()
    torch.testing.assert_close(out, net(x)[0])


@pytest.mark.parametrize("stages", [(0, 0), (0, 1)])
def test_a_long_accumulation_is_the_mean_of_its_micro_batches(stages):
    count = 1500
    x = torch.randn(count, 2)
    model = make_model(stages, True, count)
    model(x)
    assert "(" in model.compiled.executable.actions()
    net = Net()
    net(x)[1].backward()
    for name, trained in model.model.named_parameters():
        weight = net.get_parameter(name)
        torch.testing.assert_close(trained.detach(), (weight - 0.1 * weight.grad).detach())
