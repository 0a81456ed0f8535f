"""Training a model whose loss has more than one element."""

import pytest
import torch
from torch.nn import functional as F

import popsim_torch as poptorch

MISTAKES = {
    "a torch loss": lambda net, x: F.mse_loss(net.fc(x), net.fc(x) * 0, reduction="none"),
    "identity_loss": lambda net, x: poptorch.identity_loss(net.fc(x), "none"),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_several_elements(h, mistake):
    net = h.Net(mistake)
    model = h.train(net)
    with pytest.raises(poptorch.Error, match="must be a scalar tensor") as caught:
        model(*h.good_batch())
    assert "(6, 3)" in str(caught.value)
    assert "reduction=" in str(caught.value)
    net.switch["on"] = False
    h.check_training(model)


def test_one_element_of_any_rank_is_fine(h):
    class One(h.Net):
        def forward(self, x):
            return poptorch.identity_loss(self.fc(x).sum().view(1, 1, 1), "none")

    net = One()
    loss = h.train(net)(torch.ones(1, 4))
    assert loss.shape == (1, 1, 1)


def test_a_reduced_identity_loss_is_fine(h):
    class Reduced(h.Net):
        def forward(self, x, y):
            out = self.fc(x) + self.offset
            each = F.cross_entropy(out, y, reduction="none")
            return out, poptorch.identity_loss(each, "mean")

    h.check_training(h.train(Reduced()))


def test_an_unknown_reduction(h):
    def mistake(net, x):
        return poptorch.identity_loss(net.fc(x), "max")

    net = h.Net(mistake)
    model = h.train(net)
    with pytest.raises(AssertionError, match=r"Unsupported reduction type! Got 'max'"):
        model(*h.good_batch())
    net.switch["on"] = False
    h.check_training(model)
