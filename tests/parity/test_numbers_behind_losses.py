"""Numbers that forward computes from the loss and returns, which PyTorch cannot compute anew."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.parity.compare import quiet_options

NUMBERS = {
    "complex": lambda loss: torch.complex(loss, loss),
    "gather": lambda loss: (
        loss.reshape(1).expand(3).gather(0, loss.detach().long().reshape(1)).sum() * 1
    ),
    "index": lambda loss: loss.reshape(1).expand(3)[loss.detach().long().reshape(1)].sum() * 1,
}


class Net(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.number = number

    def forward(self, x):
        return self.number(poptorch.identity_loss(self.scale * x, reduction="mean"))


@pytest.mark.parametrize("name", NUMBERS)
def test_like_eager(name):
    x = torch.tensor([0.25, 0.5])
    net = Net(NUMBERS[name])
    expected = net(x).detach()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert torch.equal(poptorch.trainingModel(net, quiet_options(), optimizer)(x), expected)
