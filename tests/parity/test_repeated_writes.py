"""Changes of expanded tensors, which show each element several times."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options

# Each changes a tensor of shape (2, 3) with one row in memory.
FILLS = {
    "fill_": lambda y: y.fill_(3.0),
    "zero_": lambda y: y.zero_(),
    "part": lambda y: y[:, 1:].zero_(),
    "transposed": lambda y: y.t().fill_(5.0),
    "tril_": lambda y: y.tril_(),
    "triu_": lambda y: y.triu_(1),
    "elements at a mask": lambda y: y.__setitem__(y > 1.0, 5.0),
    "masked_fill_": lambda y: y.masked_fill_(y == 0.0, torch.tensor(1.5)),
    "known mask": lambda y: y.masked_fill_(KNOWN, 8.0),
    "indices": lambda y: y.__setitem__((torch.tensor([0, 1]), torch.tensor([1, 1])), 9.0),
    "index_fill_": lambda y: y.index_fill_(0, torch.tensor([0, 1]), 4.0),
    "fill_diagonal_": lambda y: y.fill_diagonal_(7.0),
    "threshold_": lambda y: nn.functional.threshold(y, 1.0, 2.0, inplace=True),
    "constant_": lambda y: nn.init.constant_(y, 3.0),
    "broadcast": lambda y: torch.broadcast_tensors(y[0], torch.zeros(2, 3))[0].fill_(7.0),
    "one repeat": lambda y: y[0].mul_(0.1),
    "row": lambda y: y.__setitem__(1, torch.tensor([0.1, 0.2, 0.3])),
    "then read": lambda y: y[1].add_(y.fill_(2.0)[0]),
}

KNOWN = torch.tensor([[True, False, False], [True, True, False]])
WRITES = {
    "mask": lambda y, w: y.__setitem__(y > 1.0, w[1]),
    "one element": lambda y, w: y.__setitem__(y > 1.0, w[:1]),
    "known mask": lambda y, w: y.__setitem__(KNOWN, w.sum()),
    "masked_fill_": lambda y, w: y.masked_fill_(KNOWN, w[1]),
    "index_fill_": lambda y, w: y.index_fill_(0, torch.tensor([0, 1]), w[2]),
    "indices": lambda y, w: y.__setitem__((torch.tensor([0, 1]), torch.tensor([1, 2])), w[1]),
}


class Fill(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -2.0, 0.7]))
        self._change = change

    def forward(self, x):
        x = x * 1.0
        y = x.expand(2, 3)
        self._change(y)
        factors = torch.arange(1.0, 7.0, device=y.device).view(2, 3)
        return (x, y * 1.0), poptorch.identity_loss((y * factors * self.w).sum(), "none")


@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors")
@pytest.mark.parametrize("name", FILLS)
def test_values_and_weights(name):
    model = Fill(FILLS[name])
    eager = copy.deepcopy(model)
    x = torch.tensor([0.0, 1.0, 2.1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = poptorch.trainingModel(model, make_options(), optimizer)
    (changed, out), _ = device(x)
    (expected_changed, expected), loss = eager(x)
    loss.backward()
    torch.optim.SGD(eager.parameters(), lr=0.1).step()
    assert torch.equal(changed, expected_changed)
    assert torch.equal(out, expected)
    torch.testing.assert_close(model.w.data, eager.w.data)


@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors")
@pytest.mark.parametrize("name", WRITES)
def test_gradient_of_the_value(name):
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1.0, -2.0, 0.7]))

        def forward(self, x):
            y = (x * 1.0).expand(2, 3)
            WRITES[name](y, self.w)
            factors = torch.arange(1.0, 7.0, device=y.device).view(2, 3)
            return y * 1.0, poptorch.identity_loss((y * factors).sum(), "none")

    model, eager = Written(), Written()
    x = torch.tensor([0.0, 1.0, 2.1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out, _ = poptorch.trainingModel(model, make_options(), optimizer)(x)
    expected, loss = eager(x)
    loss.backward()
    torch.optim.SGD(eager.parameters(), lr=0.1).step()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(model.w.data, eager.w.data)


class Change(nn.Module):
    def __init__(self, change):
        super().__init__()
        self._change = change

    def forward(self, x):
        self._change(x)
        return x * 1


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.expand(2, 3)[0].add_(1),
        lambda x: x.expand(2, 3).narrow(0, 0, 1).copy_(x[0] + 0.5),
        lambda x: x.view(3, 1).expand(3, 2)[1:].fill_(7),
        lambda x: x[::2].expand(4, 2).zero_(),
    ],
)
def test_input_of_integers(change):
    x = torch.arange(1, 4)
    given, expected = x.clone(), x.clone()
    out = poptorch.inferenceModel(Change(change), make_options())(given)
    assert torch.equal(out.long(), Change(change)(expected))
    assert torch.equal(given, expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y.__setitem__(torch.tensor([0, 1]), torch.ones(2, 3, device=y.device)),
        lambda y: y.index_put_((torch.tensor([1]),), torch.ones(1, device=y.device), True),
    ],
)
def test_changes_that_depend_on_their_order_are_refused(change):
    model = poptorch.inferenceModel(Change(lambda x: change(x.expand(2, 3))), make_options())
    with pytest.raises(
        poptorch.Error, match=r"test_repeated_writes.py:\d+ changes a view .*expand.*order"
    ):
        model(torch.ones(3))


def test_gradient_that_eager_pytorch_refuses():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self):
            y = (self.w * 2.0).expand(2, 3)
            y.fill_(1.0)
            return poptorch.identity_loss(y.sum(), "none")

    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        Scaled()().backward()
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = poptorch.trainingModel(model, make_options(), optimizer)
    with pytest.raises(poptorch.Error, match=r"made by expand, .* depends on their order"):
        device()
