"""Training a model with several losses that do not depend on each other."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch


def test_two_losses(h):
    def mistake(net, x):
        out = net.fc(x)
        return F.mse_loss(out, out * 0), F.l1_loss(out, out * 0)

    net = h.Net(mistake)
    model = h.train(net)
    with pytest.raises(poptorch.Error, match="Multiple independent losses found") as caught:
        model(*h.good_batch())
    assert "poptorch.identity_loss(loss1 + loss2" in str(caught.value)
    net.switch["on"] = False
    h.check_training(model)


def test_two_identity_losses(h):
    def mistake(net, x):
        out = net.fc(x)
        return poptorch.identity_loss(out, "sum"), poptorch.identity_loss(out, "mean")

    net = h.Net(mistake)
    model = h.train(net)
    with pytest.raises(poptorch.Error, match="Multiple independent losses found"):
        model(*h.good_batch())
    net.switch["on"] = False
    h.check_training(model)


class Adds(nn.Module):
    """Has two losses, and returns what a function makes of them."""

    def __init__(self, combine):
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.combine = combine

    def forward(self, x, y):
        out = self.fc(x)
        return self.combine(F.cross_entropy(out, y), F.mse_loss(out, out.detach() * 0), out)


SUMS = {
    "alone": lambda one, two, out: one + two,
    "after the output": lambda one, two, out: (out, one + two),
    "in a dict": lambda one, two, out: {"loss": (one + two) / 2, "logits": out},
    "beside its parts": lambda one, two, out: (one, two, one + 0.25 * two),
    "with a term": lambda one, two, out: one * two + 0.1 * out.square().sum(),
    "twice": lambda one, two, out: (sum([one, two]) * 1,) * 2,
    "stacked": lambda one, two, out: torch.stack([one, two]).max(),
}


METRICS = {  # (the other one is no part of the loss)
    "detached": lambda one, two, out: (out, one.detach(), two),
    "not returned": lambda one, two, out: (out, two),
    "marked": lambda one, two, out: (one.detach(), poptorch.identity_loss(2 * two, "none")),
    "as a number of both": lambda one, two, out: ((one + two).detach(), two),
}


def loss_in(output):
    if isinstance(output, dict):
        return output["loss"]
    return output[-1] if isinstance(output, tuple) else output


@pytest.mark.parametrize("combine", (SUMS | METRICS).values(), ids=SUMS | METRICS)
def test_what_forward_makes_of_all_losses_and_returns_is_trained(h, combine):
    net = Adds(combine)
    twin = copy.deepcopy(net)
    model = h.train(net)
    for _ in range(2):
        x, y = h.good_batch()
        loss = loss_in(model(x, y))
        twin.zero_grad()
        expected = loss_in(twin(x, y))
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter -= 0.125 * parameter.grad
    for parameter, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach(), other.detach())


NOT_ONE_SUM = {
    "two sums": lambda one, two, out: (one + two, one - two),
    "a sum and its double": lambda one, two, out: (one + two, (one + two) * 2),
    "a vector": lambda one, two, out: torch.stack([one, two]),
    "detached": lambda one, two, out: (one, two, (one + two).detach()),
    "one loss": lambda one, two, out: (two, one * 2),
}


@pytest.mark.parametrize("combine", NOT_ONE_SUM.values(), ids=NOT_ONE_SUM)
def test_losses_without_one_sum(h, combine):
    with pytest.raises(poptorch.Error, match="Multiple independent losses found"):
        h.train(Adds(combine))(*h.good_batch())


def test_losses_that_feed_another_one_are_fine(h):
    class Combined(h.Net):
        def forward(self, x, y):
            out = self.fc(x)
            total = self.loss(out, y) + F.mse_loss(out, out * 0)
            return out, poptorch.identity_loss(total, "sum")

    net = Combined()
    twin = h.Net()
    twin.load_state_dict(net.state_dict())
    x, y = h.good_batch()
    _, loss = h.train(net)(x, y)
    out = twin.fc(x)
    expected = twin.loss(out, y) + F.mse_loss(out, out * 0)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    weight = twin.fc.weight.detach() - 0.125 * twin.fc.weight.grad
    torch.testing.assert_close(net.fc.weight.detach(), weight)
