"""Models that call the host, for tests of what happens around the call."""

import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import OutputMode
from tests.options import make_options

X = torch.tensor([1.0, -2.0])


class Calling(nn.Module):
    """A model that doubles its input, calls the host, and adds one."""

    def __init__(self, function):
        super().__init__()
        self.cpu = poptorch.CPU(function, "code")

    def forward(self, x):
        return self.cpu(2 * x) + 1


def infer(function, d=1):
    options = make_options(d).outputMode(OutputMode.All)
    return poptorch.inferenceModel(Calling(function), options)


class Failing:
    """A function that returns its argument, except in the calls that raise an exception."""

    def __init__(self, error, *when):
        self.num_calls = 0
        self._error, self._when = error, when

    def __call__(self, x):
        self.num_calls += 1
        if self.num_calls in self._when:
            raise self._error
        return x


class Net(nn.Module):
    """A model with everything that micro-batches change: statistics, velocities, random numbers."""

    def __init__(self, code, stages):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.cpu = poptorch.CPU(code, "code")
        self._stages = stages

    def forward(self, x):
        with poptorch.Block("a", ipu_id=self._stages[0]):
            x = self.drop(self.norm(torch.tanh(self.first(x))))
        with poptorch.Block("b", ipu_id=self._stages[1]):
            x = self.cpu(x)
            return poptorch.identity_loss(self.last(x).square(), "mean")
