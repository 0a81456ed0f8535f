"""Training a model that computes no loss, and a model without anything to train."""

import logging

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


def check_nothing_is_trained(model, inputs, expected, caplog):
    """Call a training model twice; it returns the loss, and the weights do not change."""
    before = {name: value.clone() for name, value in model.model.state_dict().items()}
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        for _ in range(2):
            result = model(*inputs)
            loss = result[-1] if isinstance(result, tuple) else result
            torch.testing.assert_close(loss, expected)
    assert "nothing is trained" in caplog.text
    for name, value in model.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_loss_without_parameters(h, caplog):
    class Fixed(h.Net):
        def forward(self, x, y=None):
            out = super().forward(x, y)
            return out if y is not None else poptorch.identity_loss(x, "mean")

    x, _ = h.good_batch()
    model = h.train(Fixed())
    check_nothing_is_trained(model, [x], x.mean(), caplog)
    model.destroy()
    h.check_training(h.train(model.model))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_loss_of_frozen_parameters(h, caplog, accumulation):
    net = h.Net()
    net.requires_grad_(False)
    x, y = h.good_batch()
    expected = net(x[-2:], y[-2:])[1] if accumulation > 1 else net(x, y)[1]
    optimizer = poptorch.optim.Adam(net.parameters(), lr=0.1)
    model = poptorch.trainingModel(net, h.make_options(1, accumulation), optimizer)
    check_nothing_is_trained(model, [x, y], expected, caplog)
    model.destroy()
    net.requires_grad_(True)
    h.check_training(h.train(net))


def test_two_losses_without_parameters(h):
    class Two(h.Net):
        def forward(self, x, y=None):
            if y is not None:
                return super().forward(x, y)
            return poptorch.identity_loss(x, "mean"), poptorch.identity_loss(x, "sum")

    model = h.train(Two())
    with pytest.raises(poptorch.Error, match="Multiple independent losses") as caught:
        model(h.good_batch()[0])
    assert "one final loss" in str(caught.value)
    h.check_training(model)


def test_inference_needs_none(h):
    h.check_inference(poptorch.inferenceModel(h.Net(), h.make_options()))


def test_no_grad_around_the_loss(h, caplog):
    class NoGrad(h.Net):
        def forward(self, x, y):
            with torch.no_grad():
                return super().forward(x, y)

    net = NoGrad()
    x, y = h.good_batch()
    expected = net(x, y)[1]
    check_nothing_is_trained(h.train(net), [x, y], expected, caplog)
