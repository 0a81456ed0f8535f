"""Training a model that computes no loss, and one that nothing can be learnt from."""

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


class Untrained:
    """Ways in which no gradient gets from the loss to a parameter."""

    @staticmethod
    def other_values(h):
        class OfInput(h.Net):
            def forward(self, x, y):
                return self.fc(x) + self.offset, poptorch.identity_loss(x, "mean")

        return OfInput()

    @staticmethod
    def frozen(h):
        return h.Net().requires_grad_(False)

    @staticmethod
    def no_grad(h):
        class NoGrad(h.Net):
            def forward(self, x, y):
                with torch.no_grad():
                    return super().forward(x, y)

        return NoGrad()

    @staticmethod
    def integers(h):
        class Counted(h.Net):
            def forward(self, x, y):
                out = self.fc(x) + self.offset
                return out, poptorch.identity_loss((out > 0).int(), "sum")

        return Counted()


@pytest.mark.parametrize("way", ["other_values", "frozen", "no_grad", "integers"])
def test_without_a_gradient_nothing_is_trained(h, way, caplog):
    """Outputs and loss come back as from any other model, and the log says so."""
    net = getattr(Untrained, way)(h)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    x, y = h.good_batch()
    expected = net(x, y)
    model = h.train(net)
    for _ in range(2):
        for ours, eager in zip(model(x, y), expected, strict=True):
            torch.testing.assert_close(ours.float(), eager.detach().float())
    assert "does not depend on any parameter that requires a gradient" in caplog.text
    model.copyWeightsToHost()
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    h.check_training(h.train(h.Net()))


def test_without_a_gradient_the_loss_is_a_number_all_the_same(h):
    class Several(h.Net):
        def forward(self, x, y):
            return poptorch.identity_loss(x, "none")

    with pytest.raises(poptorch.Error, match="must be a scalar tensor"):
        h.train(Several())(*h.good_batch())


def test_inference_needs_none(h):
    h.check_inference(poptorch.inferenceModel(h.Net(), h.make_options()))
