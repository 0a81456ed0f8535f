"""The common code of executor tests: small models, options, and reference results."""

import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


LR = 0.125


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 5)
        self.fc2 = nn.Linear(5, 3)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y=None):
        x = self.fc2(torch.tanh(self.fc1(x)))
        return x if y is None else (x, self.loss(x, y))


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, *args):
        return self._function(*args)


def train(net, options=None, optimizer=None):
    optimizer = optimizer or poptorch.optim.SGD(net.parameters(), lr=LR)
    return poptorch.trainingModel(net, options or make_options(), optimizer)


def infer(net, options=None):
    return poptorch.inferenceModel(net, options or make_options())


def batch(size=6):
    return torch.randn(size, 4), torch.randint(0, 3, (size,))


def eager_step(net, optimizer, x, y):
    optimizer.zero_grad()
    out, loss = net(x, y)
    loss.backward()
    optimizer.step()
    return out.detach(), loss.detach()


def assert_same_weights(net, other):
    for name, value in other.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value, **TOLERANCE)
