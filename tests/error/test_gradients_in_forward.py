"""Forward computes gradients where this is not possible."""

import pytest
import torch

import popsim_torch as poptorch


@pytest.mark.parametrize(
    "mistake",
    [
        lambda self, x: torch.autograd.grad(self.fc(x).sum(), self.fc.weight),
        lambda _, x: torch.autograd.grad(x.sin().sum(), x),
        lambda self, x: self.fc(x).sum().backward(),
    ],
    ids=["by weight", "by input", "backward"],
)
def test_in_inference(h, mistake):
    net = h.Net(mistake)
    executor = poptorch.inferenceModel(net, h.make_options())
    with pytest.raises(
        poptorch.Error, match=r"test_gradients_in_forward.py:\d+ computes gradients"
    ) as caught:
        executor(h.good_batch()[0])
    assert "torch.enable_grad()" in str(caught.value)
    net.switch["on"] = False
    h.check_inference(executor)


def test_backward_adds_to_the_gradient_of_a_parameter(h):
    def mistake(self, x):
        self.fc(x).square().sum().backward()

    net = h.Net(mistake)
    text = h.refuse_training(net, h.make_options(), poptorch.Error, "calls backward")
    assert "'fc.weight'" in text
    assert "torch.autograd.grad" in text
    net.switch["on"] = False
    h.check_training(h.train(net))
