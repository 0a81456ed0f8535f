"""The helpers for tests of tensor names."""

import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options


def trained(net, *inputs, options=None, optimizer=None):
    """Return the compiled training executor of a model."""
    optimizer = optimizer or poptorch.optim.SGD(net.parameters(), lr=0.125)
    model = poptorch.trainingModel(net, options or make_options(), optimizer)
    model.compile(*inputs)
    return model


def names_of(net, *inputs, **settings):
    """Return the names of a training graph; check that each is there only once."""
    names = trained(net, *inputs, **settings).getTensorNames()
    assert all(type(name) is str for name in names)
    assert len(names) == len(set(names))
    return names


def inference_names_of(net, *inputs, options=None):
    model = poptorch.inferenceModel(net, options or make_options())
    model.compile(*inputs)
    return model.getTensorNames()


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 5)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(5, 3)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y=None):
        x = self.fc2(self.relu(self.fc1(x)))
        return x if y is None else (x, self.loss(x, y))


def batch(size=6):
    return torch.randn(size, 4), torch.randint(0, 3, (size,))


MLP_TRAINED = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, *args):
        return self._function(*args)
