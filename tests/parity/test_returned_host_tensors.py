"""Host tensors that forward writes values of the device into, and returns."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch
from tests.parity.compare import quiet_options


class Net(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.template = torch.zeros(2)
        self.fc = nn.Linear(2, 2)
        self.write = write

    def forward(self, x, y):
        out = self.fc(x)
        written = self.write(self, out)
        return written, out, F.mse_loss(out, y)


def element(net, out):
    table = net.template.clone()
    table[0] = out[0, 0]
    return table


def of_data(net, out):
    table = torch.Tensor([1.0, 2.0])
    table[1] = out[0, 1]
    return {"table": table, "twice": [2 * table, table]}


def as_out(net, out):
    table = torch.zeros_like(net.template)
    torch.add(out[0].detach(), 1, out=table)
    return table


def through_data(net, out):
    table = net.template.clone()
    table.data.copy_(out[1])
    return table


@pytest.mark.parametrize("write", [element, of_data, as_out, through_data])
def test_the_values_are_returned(write):
    net = Net(write)
    x, y = torch.randn(2, 3, 2), torch.randn(3, 2)
    eager = copy.deepcopy(net)
    model = poptorch.trainingModel(net, quiet_options(), torch.optim.SGD(net.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    for batch in x:
        found = model(batch, y)
        expected = eager(batch, y)
        torch.testing.assert_close(found, expected, check_stride=False)
        optimizer.zero_grad()
        expected[2].backward()
        optimizer.step()
    assert torch.equal(net.template, torch.zeros(2))
    inference = poptorch.inferenceModel(net, quiet_options())
    torch.testing.assert_close(inference(x[0], y), net(x[0], y))


def test_one_that_forward_leaves_alone_is_returned_as_it_is():
    model = poptorch.inferenceModel(Net(lambda net, out: net.template), quiet_options())
    with pytest.warns(UserWarning, match="Output expected to be on the IPU"):
        found, _, _ = model(torch.ones(3, 2), torch.ones(3, 2))
    assert torch.equal(found, torch.zeros(2))


def test_a_write_through_a_view_is_refused():
    def part(net, out):
        table = net.template.clone()
        table[0].copy_(out[0, 0])
        return table

    model = poptorch.inferenceModel(Net(part), quiet_options())
    with pytest.raises(poptorch.Error, match=r"shares its memory.*to\(x.device\)"):
        model(torch.ones(3, 2), torch.ones(3, 2))
