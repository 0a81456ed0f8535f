"""Views whose shape changes in place, and changes of values after that."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.parity.compare import quiet_options


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return poptorch.identity_loss(self.function(self.fc(x)).square().sum(), "none")


def in_place(function):
    """Return a function that returns its argument, after a change of it."""

    def called(x):
        function(x)
        return x

    return called


def last_column(x):
    column = x[:, -1:]
    column.squeeze_(1)
    return column


def transposed_view_written(x):
    view = x.view(2, 8)
    view.t_()
    view[0] = 5.0
    return x


def base_changed(x):
    column = last_column(x)
    x.mul_(2)
    return column


def view_made_before(x):
    view = x[:2]
    x.t_()
    view[0] = 1.0
    return x


def views_of_a_changed_base(x):
    view = x[:2]
    x.transpose_(0, 1)
    x.mul_(2)
    return view


REFUSED = {
    "squeeze_ and relu_": lambda x: last_column(x).relu_(),
    "t_ and assignment": transposed_view_written,
    "squeeze_ and the base": base_changed,
    "unsqueeze_ and add_": lambda x: x[0].unsqueeze_(0).add_(1),
    "as_strided_ and mul_": lambda x: x.view(-1).as_strided_((4,), (4,)).mul_(2),
    "a view made before": view_made_before,
    "a base with views": views_of_a_changed_base,
}


def train(function):
    net = Net(function)
    eager = copy.deepcopy(net)
    model = poptorch.trainingModel(net, quiet_options(), torch.optim.SGD(net.parameters(), lr=0.01))
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.01)
    for x in torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1)):
        optimizer.zero_grad()
        eager(x).backward()
        optimizer.step()
        model(x)
    torch.testing.assert_close(net.fc.weight, eager.fc.weight)


@pytest.mark.parametrize("name", REFUSED)
def test_with_gradients(name):
    with pytest.raises(poptorch.Error, match=r"has changed the shape of a view.*x = x\.") as caught:
        train(REFUSED[name])
    assert str(caught.value).count(f"{__file__}:") == 2


@pytest.mark.parametrize("name", REFUSED)
def test_in_inference(name):
    class Values(Net):
        def forward(self, x):
            return self.function(self.fc(x))

    net, x = Values(REFUSED[name]), torch.randn(4, 4)
    with torch.no_grad():
        expected = net(x)
    torch.testing.assert_close(poptorch.inferenceModel(net, quiet_options())(x), expected)


def view_made_after(x):
    x.t_()
    x[0].mul_(2)
    return x


def changed_before(x):
    x.mul_(2)
    return last_column(x)


def changed_without_gradients(x):
    column = x.detach()[:, -1:].clone()[:, :1]
    column.squeeze_(1)
    column.mul_(2)
    return x + column


ALLOWED = {
    "no view": in_place(lambda x: x.t_().triu_()),
    "a view made after": view_made_after,
    "no change of values": last_column,
    "a change before": changed_before,
    "a change of another tensor": lambda x: (last_column(x) + 1).relu_(),
    "without gradients": changed_without_gradients,
    "out of place": lambda x: x[:, -1:].squeeze(1).relu_(),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_allowed(name):
    train(ALLOWED[name])
