"""Distances of all pairs of rows, also of no rows, whose gradient ends the process in PyTorch."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options


class Distances(nn.Module):
    def __init__(self, rows, columns, p):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self._rows, self._columns, self._p = rows, columns, p

    def forward(self, x):
        part = (x * self.scale)[: self._rows, : self._columns]
        distances = nn.functional.pdist(part, self._p)
        return distances, poptorch.identity_loss(distances.sum() + 2 * self.scale, "none")


@pytest.mark.parametrize("p", [1.0, 2.0])
@pytest.mark.parametrize("rows, columns", [(3, 4), (1, 4), (0, 4)])
def test_values_and_gradient(rows, columns, p):
    x = torch.randn(3, 4)
    net = Distances(rows, columns, p)
    distances, loss = poptorch.trainingModel(
        net, make_options(1), torch.optim.SGD(net.parameters(), lr=0.1)
    )(x)
    scale = torch.tensor(1.5, requires_grad=True)
    expected = nn.functional.pdist(x[: max(rows, 1)] * scale, p)
    (expected.sum() + 2 * scale).backward()
    torch.testing.assert_close(distances, expected.detach())
    torch.testing.assert_close(loss.reshape(()), (expected.sum() + 2 * scale).detach())
    torch.testing.assert_close(net.scale.detach(), (scale - 0.1 * scale.grad).detach())


def test_what_pytorch_refuses():
    net = Distances(0, 4, -1.0)
    with pytest.raises(RuntimeError, match="non-negative p"):
        poptorch.inferenceModel(net, make_options(1))(torch.randn(3, 4))
