"""Training a model that computes no loss, or one that nothing can be learnt from."""

import pytest
import torch

import popsim_torch as poptorch


def test_no_loss_at_all(h):
    net = h.Net()
    model = h.train(net)
    x, _ = h.good_batch()
    with pytest.raises(poptorch.Error, match="Couldn't find a loss in graph") as caught:
        model(x)
    assert "identity_loss" in str(caught.value)
    assert not model.isCompiled()
    h.check_training(model)


def test_a_mean_is_no_loss(h):
    class Mean(h.Net):
        def forward(self, x, y=None):
            return super().forward(x, y) if y is not None else self.fc(x).mean()

    model = h.train(Mean())
    with pytest.raises(poptorch.Error, match="Couldn't find a loss in graph"):
        model(h.good_batch()[0])
    h.check_training(model)


def test_a_loss_without_parameters(h):
    class Fixed(h.Net):
        def forward(self, x, y=None):
            out = super().forward(x, y)
            return out if y is not None else poptorch.identity_loss(x, "mean")

    model = h.train(Fixed())
    with pytest.raises(poptorch.Error, match="does not depend on any parameter"):
        model(h.good_batch()[0])
    h.check_training(model)


def test_a_loss_of_frozen_parameters(h):
    net = h.Net()
    net.requires_grad_(False)
    h.refuse_training(net, h.make_options(), poptorch.Error, "does not depend on any parameter")
    net.requires_grad_(True)
    h.check_training(h.train(net))


def test_inference_needs_none(h):
    h.check_inference(poptorch.inferenceModel(h.Net(), h.make_options()))


def test_no_grad_around_the_loss(h):
    class NoGrad(h.Net):
        def forward(self, x, y):
            with torch.no_grad():
                return super().forward(x, y)

    with pytest.raises(poptorch.Error, match="does not depend on any parameter"):
        h.train(NoGrad())(*h.good_batch())
