"""Training a model with several losses that do not depend on each other."""

import pytest
import torch
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


def test_a_sum_of_two_losses_is_not_combined_by_itself(h):
    class Adds(h.Net):
        def forward(self, x, y):
            out = self.fc(x)
            return out, self.loss(out, y) + F.mse_loss(out, out * 0)

    with pytest.raises(poptorch.Error, match="Multiple independent losses found"):
        h.train(Adds())(*h.good_batch())


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
