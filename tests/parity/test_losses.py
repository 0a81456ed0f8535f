"""Losses that compare element by element: values and gradients against eager PyTorch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import popsim_torch as poptorch
from tests.parity.compare import assert_close, quiet_options
from tests.parity.tolerances import ONE_PASS

WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0, 0.25, 1.5])


def weighted(x, y, **settings):
    return F.binary_cross_entropy(x.sigmoid(), y, weight=WEIGHT.to(x.dtype), **settings)


def with_logits(x, y, **settings):
    weights = {"weight": WEIGHT.to(x.dtype), "pos_weight": WEIGHT.flip(0).to(x.dtype)}
    return F.binary_cross_entropy_with_logits(x, y, **weights, **settings)


LOSSES = {
    "bce": lambda x, y, **s: F.binary_cross_entropy(x.sigmoid(), y, **s),
    "bce weighted": weighted,
    "bce with logits": F.binary_cross_entropy_with_logits,
    "bce with logits weighted": with_logits,
    "huber": F.huber_loss,
    "huber 0.3": lambda x, y, **s: F.huber_loss(x, y, delta=0.3, **s),
    "l1": F.l1_loss,
    "mse": F.mse_loss,
    "smooth l1": F.smooth_l1_loss,
    "smooth l1 0.3": lambda x, y, **s: F.smooth_l1_loss(x, y, beta=0.3, **s),
    "smooth l1 0": lambda x, y, **s: F.smooth_l1_loss(x, y, beta=0.0, **s),
}


class Model(nn.Module):
    """A loss of what it learns, so that its gradient can be anchored."""

    def __init__(self, x: torch.Tensor, loss, settings) -> None:
        super().__init__()
        self.x = nn.Parameter(x.clone())
        self._loss, self._settings = loss, settings

    def forward(self, y):
        loss = self._loss(self.x, y, **self._settings)
        total = (loss * torch.arange(1, 8, dtype=loss.dtype)).sum() if loss.dim() else 2 * loss
        return loss, poptorch.identity_loss(total, "none")


def run(x, y, loss, **settings):
    """Return loss, gradient and program on the device."""
    options = quiet_options()
    options.anchorTensor("gradient", "Gradient___x")
    model = Model(x, loss, settings)
    training = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0))
    value, _ = training(y)
    program = training.program(host=True)
    return value, training.getAnchoredTensor("gradient"), program


def eager(x, y, loss, **settings):
    """Return loss and gradient in float32."""
    model = Model(x.float(), loss, settings)
    value, total = model(y.float())
    total.backward()
    return value.detach(), model.x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_loss(name, reduction, dtype):
    x, y = torch.randn(5, 7).to(dtype), torch.rand(5, 7).to(dtype)
    loss, gradient, program = run(x, y, LOSSES[name], reduction=reduction)
    expected, expected_gradient = eager(x, y, LOSSES[name], reduction=reduction)
    assert_close(loss, expected.to(dtype), ONE_PASS[dtype], "loss")
    assert_close(gradient, expected_gradient.to(dtype), ONE_PASS[dtype], "gradient")
    others = [line for line in program.splitlines() if "aten(" in line and "setup" not in line]
    assert not [line for line in others if "_assert_async" not in line]


def test_probabilities_of_zero_and_one():
    x = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.5, 1e-30, 1.0 - 6e-8])
    y = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.3, 1.0, 0.0])
    loss, gradient, _ = run(x, y, F.binary_cross_entropy, reduction="none")
    expected, expected_gradient = eager(x, y, F.binary_cross_entropy, reduction="none")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("bad", [-0.1, 1.1, torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("which", ["input", "target"])
def test_what_is_no_probability_is_refused(which, dtype, bad):
    tensors = {name: torch.full((7,), 0.5, dtype=dtype) for name in ("input", "target")}
    tensors[which][2] = bad
    with pytest.raises(poptorch.Error, match=f"all elements of {which} should be between 0 and 1"):
        run(*tensors.values(), F.binary_cross_entropy, reduction="none")


@pytest.mark.parametrize("name", ["huber", "smooth l1", "l1", "mse"])
def test_kinks_infinities_and_nan(name):
    x = torch.tensor([1.0, -1.0, 0.0, torch.inf, -torch.inf, torch.nan, 1.0000001])
    loss, gradient, _ = run(x, torch.zeros(7), LOSSES[name], reduction="none")
    expected, expected_gradient = eager(x, torch.zeros(7), LOSSES[name], reduction="none")
    torch.testing.assert_close(loss, expected, equal_nan=True)
    torch.testing.assert_close(gradient, expected_gradient, equal_nan=True)


def test_a_gradient_of_the_target():
    def loss(x, y):
        return F.smooth_l1_loss(y, x) + F.huber_loss(y, x) + F.mse_loss(y, x)

    x, y = torch.randn(5, 7), torch.randn(5, 7)
    value, gradient, _ = run(x, y, loss)
    expected, expected_gradient = eager(x, y, loss)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient, expected_gradient)


def test_no_elements():
    class Empty(nn.Module):
        def forward(self, x):
            return F.smooth_l1_loss(x[:0], x[:0], reduction="sum") + x.sum()

    model = poptorch.inferenceModel(Empty(), quiet_options())
    assert model(torch.ones(3)).item() == 3.0


OF_NOTHING = {
    "mse": F.mse_loss,
    "smooth l1": lambda x, y: F.smooth_l1_loss(x, y, beta=0.5),
    "huber": lambda x, y: F.huber_loss(x, y, delta=0.5),
    "l1": F.l1_loss,
    "mse sum": lambda x, y: F.mse_loss(x, y, reduction="sum"),
}


@pytest.mark.parametrize("name", OF_NOTHING)
def test_a_mean_of_nothing_trains_on(name):
    loss = OF_NOTHING[name]

    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.ones(3, 2))

        def forward(self, y):
            of_nothing = loss(self.x[:0], y[:0])
            total = of_nothing + self.x.square().sum()
            return of_nothing, poptorch.identity_loss(total, "none")

    ours, eager = Rows(), Rows()
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.25)
    training = poptorch.trainingModel(
        ours, quiet_options(), poptorch.optim.SGD(ours.parameters(), lr=0.25)
    )
    y = torch.rand(3, 2)
    for _ in range(2):
        optimizer.zero_grad()
        expected = eager(y)
        expected[1].backward()
        optimizer.step()
        torch.testing.assert_close(
            training(y), tuple(one.detach() for one in expected), equal_nan=True
        )
    torch.testing.assert_close(ours.x, eager.x)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", [F.huber_loss, F.soft_margin_loss, F.mse_loss])
@pytest.mark.parametrize("dtypes", [(torch.half, torch.float), (torch.float, torch.half)])
def test_the_dtype_of_a_loss_of_two_dtypes(loss, reduction, dtypes):
    class Loss(nn.Module):
        def forward(self, x, y):
            return loss(x, y, reduction=reduction)

    x, y = torch.rand(5).to(dtypes[0]), torch.ones(5, dtype=dtypes[1])
    found = poptorch.inferenceModel(Loss(), quiet_options())(x, y)
    torch.testing.assert_close(found, Loss()(x, y), rtol=1e-2, atol=1e-3)


def test_layers_that_make_tensors_in_their_gradient():
    model = nn.Sequential(nn.CrossMapLRN2d(3, 0.1), nn.Flatten(), nn.Linear(12, 2))

    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(3, 3, 1)
            self.layers = model

        def forward(self, x):
            out = self.layers(self.first(x))
            return out, poptorch.identity_loss(out.square().sum(), "none")

    ours = Normalised()
    eager = copy.deepcopy(ours)
    x = torch.rand(4, 3, 2, 2)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.01)
    eager(x)[1].backward()
    optimizer.step()
    training = poptorch.trainingModel(
        ours, quiet_options(), poptorch.optim.SGD(ours.parameters(), lr=0.01)
    )
    training(x)
    for name, weight in eager.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), weight, rtol=1e-4, atol=1e-5)
