"""Long loops of a program: Ctrl-C ends them, and they need little memory and time."""

import time
from pathlib import Path

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options
from tests.unit.runtime.test_stop import ctrl_c, interrupted  # noqa: F401

# A run that ignores signals blocks the main thread, so another thread must end the tests.
pytestmark = pytest.mark.timeout(60, method="thread")

FOREVER = 10**12


class Counts(nn.Module):
    """A model that changes buffers before and after a loop of ``count`` iterations."""

    def __init__(self, count, differentiates=False):
        super().__init__()
        self.w = nn.Parameter(torch.full((4,), 0.5))
        self.register_buffer("begun", torch.zeros(1))
        self.register_buffer("done", torch.zeros(1))
        self.count, self.differentiates = count, differentiates

    def forward(self, x):
        with torch.no_grad():
            self.begun.add_(1)
        with torch.set_grad_enabled(self.differentiates):
            (y,) = poptorch.for_loop(self.count, lambda y: torch.tanh(y * self.w) + 0.5, [x])
        with torch.no_grad():
            self.done.add_(1)
        return poptorch.identity_loss((y * self.w).sum(), "none")


def trainer(net, iterations=1):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    return poptorch.trainingModel(net, make_options(iterations), optimizer)


def test_inference_is_usable_behind_an_interrupted_loop():
    class Model(nn.Module):
        def forward(self, x):
            def long(y):
                return poptorch.for_loop(FOREVER, lambda z: z * 0.5 + 1, [y])[0]

            return poptorch.cond(x.sum() > 0, long, [x], torch.sin, [x])[0]

    model = poptorch.inferenceModel(Model(), make_options())
    model.compile(torch.ones(4))
    for _ in range(2):
        assert interrupted(model, torch.ones(4), 0.3) < 1.0
        assert torch.allclose(model(-torch.ones(4)), torch.sin(-torch.ones(4)))


def test_a_loop_as_long_as_a_value_says():
    class Model(nn.Module):
        def forward(self, x, wanted):
            return torch.while_loop(lambda y: y.sum() < wanted, lambda y: (y + 1,), (x,))[0]

    model = poptorch.inferenceModel(Model(), make_options())
    x = torch.zeros(4)
    model.compile(x, torch.tensor(0.0))
    executable = lambda *_: model(x, torch.tensor(1e30))  # noqa: E731
    executable.compiled = model.compiled
    assert interrupted(executable, None, 0.3) < 1.0
    assert torch.equal(model(x, torch.tensor(10.0)), torch.full((4,), 3.0))


def test_training_with_a_loop_that_does_not_end():
    net = Counts(FOREVER)
    model = trainer(net)
    model.compile(torch.ones(4))
    # This also tests a run that begins just after the previous run was stopped.
    for seconds in (0.3, 0.05, 0.05):
        assert interrupted(model, torch.ones(4), seconds) < 1.0
        model.copyWeightsToHost()
        assert net.begun == net.done == 0
        assert torch.equal(net.w, torch.full((4,), 0.5))


@pytest.mark.parametrize("differentiates", [False, True])
def test_training_leaves_what_whole_device_iterations_left(differentiates):
    iterations = 100_000
    net = Counts(1000, differentiates)
    model = trainer(net, iterations)
    x = torch.ones(iterations, 4)
    model.compile(x)
    assert interrupted(model, x, 0.3) < 1.0
    step = model.rng_state[1]
    model.copyWeightsToHost()
    assert net.begun == net.done == step
    assert 0 < step < iterations
    twin = Counts(1000, differentiates)
    other = trainer(twin, step)
    other(x[:step])
    other.copyWeightsToHost()
    assert torch.equal(net.w, twin.w)


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_million_iterations():
    class Model(nn.Module):
        def forward(self, x):
            return poptorch.for_loop(10**6, lambda y: y * 0.5 + 1, [x])[0]

    model = poptorch.inferenceModel(Model(), make_options())
    assert torch.allclose(model(torch.zeros(8)), torch.full((8,), 2.0))
    before, start = resident(), time.process_time()
    model(torch.zeros(8))
    # Far more than necessary: an iteration with its op takes 0.05 us.
    assert time.process_time() - start < 2.0
    assert resident() - before < 2**20
