"""A model that calls a function, and options for it."""

import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options

IMAGES = torch.randn(2, 3, 8)
X = torch.randn(4, 3)


class Model(nn.Module):
    """Two convolutions and a product, called by ``function(model, *inputs)``."""

    def __init__(self, function):
        super().__init__()
        self.left, self.right = nn.Conv1d(3, 2, 3), nn.ConvTranspose1d(3, 2, 3)
        self.fc = nn.Linear(3, 2)
        self._function = function

    def forward(self, *args):
        return self._function(self, *args)


def inference(function, options=None):
    """Return an executor of a model, whose weights are always the same."""
    torch.manual_seed(1)
    return poptorch.inferenceModel(Model(function), options or make_options())
