"""``identity_loss`` in every reduction, by itself and around others, against eager PyTorch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch
from tests.parity.compare import assert_close, quiet_options
from tests.parity.tolerances import ONE_PASS

LOSSES = {
    "sum": lambda x: poptorch.identity_loss(x, "sum"),
    "mean": lambda x: poptorch.identity_loss(x=x, reduction="mean"),
    "none": lambda x: poptorch.identity_loss(x.square().sum(), "none"),
    "none of one element": lambda x: poptorch.identity_loss(x.mean().reshape(1, 1), "none"),
    "none inside of mean": lambda x: poptorch.identity_loss(
        poptorch.identity_loss(x * x, "none"), "mean"
    ),
    "sum inside of none": lambda x: poptorch.identity_loss(
        poptorch.identity_loss(x * x, "sum"), "none"
    ),
    "mean inside of sum": lambda x: poptorch.identity_loss(
        3 * poptorch.identity_loss(x.exp(), "mean"), "sum"
    ),
    "two inside of sum": lambda x: poptorch.identity_loss(
        poptorch.identity_loss(x, "sum") + poptorch.identity_loss(x * x, "mean"), "sum"
    ),
    "around a loss": lambda x: poptorch.identity_loss(F.mse_loss(x, x.detach() + 1), "sum"),
    "around a loss of elements": lambda x: poptorch.identity_loss(
        F.l1_loss(x, torch.ones_like(x), reduction="none"), "mean"
    ),
    "of a view": lambda x: poptorch.identity_loss(x.t()[1:, ::2], "mean"),
}


class Model(nn.Module):
    """A loss of what it learns, so that its gradient can be anchored."""

    def __init__(self, x, loss):
        super().__init__()
        self.x = nn.Parameter(x.clone())
        self._loss = loss

    def forward(self, scale):
        return self._loss(self.x * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient(name, dtype):
    x, scale = torch.randn(4, 6).to(dtype), torch.tensor([1.5], dtype=dtype)
    twin = Model(x.float(), LOSSES[name])
    expected = twin(scale.float())
    expected.backward()
    options = quiet_options()
    options.anchorTensor("gradient", "Gradient___x")
    model = Model(x, LOSSES[name])
    training = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0))
    loss = training(scale)
    assert loss.dtype == dtype and loss.shape == expected.shape
    assert_close(loss, expected, ONE_PASS[dtype], "loss")
    gradient = training.getAnchoredTensor("gradient")
    assert gradient.dtype == dtype
    assert_close(gradient, twin.x.grad, ONE_PASS[dtype], "gradient")
    inference = poptorch.inferenceModel(Model(x, LOSSES[name]), quiet_options())
    assert torch.equal(inference(scale), loss)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_integers_in_inference(reduction):
    x = torch.arange(6).reshape(2, 3)
    model = poptorch.inferenceModel(
        Model(torch.ones(1), lambda _: poptorch.identity_loss(x.to("ipu"), reduction)),
        quiet_options(),
    )
    expected = poptorch.identity_loss(x, reduction)
    assert torch.equal(model(torch.ones(1)), expected.int())


def test_a_mean_of_integers_is_pytorchs_error():
    with pytest.raises(RuntimeError, match="Input dtype must be either a floating point") as host:
        poptorch.identity_loss(torch.arange(3), "mean")
    wrong = Model(torch.ones(3), lambda x: poptorch.identity_loss(x.int(), "mean"))
    with pytest.raises(RuntimeError, match="Input dtype must be either a floating point") as ours:
        poptorch.inferenceModel(wrong, quiet_options())(torch.ones(1))
    assert type(host.value) is type(ours.value)


@pytest.mark.parametrize("in_model", [False, True], ids=["host", "model"])
@pytest.mark.parametrize("reduction", ["average", "Sum", "", None, 1, poptorch.ReductionType.Mean])
def test_another_reduction_is_an_error(reduction, in_model):
    call = Model(torch.ones(2), lambda x: poptorch.identity_loss(x, reduction))
    if in_model:
        call = poptorch.inferenceModel(call, quiet_options())
    with pytest.raises(AssertionError, match="Unsupported reduction type!"):
        call(torch.ones(1))
