"""A model and a stand-in for its executor, for the tests of ``host_weights``."""

import torch
from torch import nn

from popsim_torch.executor.host_weights import plain, wrap


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("offset", torch.zeros(2))

    def forward(self, x):
        return self.norm(self.layer(x)) * self.scale + self.offset


class Device:
    """A stand-in for an executor: its weights are newer until the host reads them."""

    def __init__(self, model):
        self.model = model
        self.ahead = None
        self.num_copies = 0
        self.num_destroys = 0
        self.wrapping = wrap(model, self.sync, self.destroy)

    def train(self, value):
        self.ahead = value

    def sync(self):
        if self.ahead is None:
            return False
        value, self.ahead = self.ahead, None
        self.num_copies += 1
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            if tensor.is_floating_point():
                plain(tensor).fill_(value)
        return True

    def destroy(self):
        self.num_destroys += 1
        self.sync()
        self.wrapping.undo()


def all_tensors(model):
    return [*model.parameters(), *model.buffers()]
