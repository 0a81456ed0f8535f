"""Elementwise functions, sums and means of elements at a mask that only a run knows."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import popsim_torch as poptorch

CALLS = {}


def call(function):
    CALLS[function.__name__] = function
    return function


@call
def logarithm(z, w, s):
    y = torch.zeros_like(z)
    mask = z > 0
    y[mask] = torch.log(z[mask]) * s
    return y


@call
def no_element(z, w, s):
    y, mask = z * 2, z > 100
    y[mask] = torch.log(z[mask] - 100) * s + torch.pow(z[mask] - 100, s)
    return y


@call
def several(z, w, s):
    y, mask = w.clone(), z > 0.3
    y[mask] = z[mask].sqrt() / w[mask].abs() + s.sum()
    return y


@call
def changes(z, w, s):
    y, mask = z * 2, z > 0
    y[mask] += w[mask]
    y[mask] -= 0.1 * z[mask]
    y[mask] = y[mask].clamp(0, 1)
    return y


@call
def rows(z, w, s):
    y, mask = z * 1, z[..., 0] > 0
    y[mask] = torch.relu(z[mask]) * torch.arange(4.0) + 1
    return y


@call
def results(z, w, s):
    mask = z > 0
    return z[mask].mean() + (w[mask] * 2).sum() * s + z[~mask].sum() + z[z > 100].sum() * s


@call
def centred(z, w, s):
    y, mask = w * 1, z > 0
    y[mask] = z[mask] - z[mask].mean()
    return y


@call
def in_place(z, w, s):
    y, mask = w * 1, z > 0
    found = z[mask]
    found.mul_(2)
    found += 1
    y[mask] = -found
    return y


@call
def shared_memory(z, w, s):
    y, mask = w * 1, z > 0
    found = z[mask].detach()
    same = found.detach().float()
    same += 1
    y[mask] = found * z[mask]
    return y


@call
def in_place_without_elements(z, w, s):
    y, mask = w * 1, z > 100
    found = z[mask]
    found.sub_(100).log_()
    y[mask] = found * s + torch.zeros_like(found)
    return y


@call
def choices(z, w, s):
    y, mask = w * 1, z > 0
    y[mask] = torch.where(z[mask] > 1, z[mask], w[mask] ** 2).clamp(max=3)
    return y


@call
def functions(z, w, s):
    y, mask = w * 1, z > 0
    y[mask] = 2.0 - F.gelu(torch.masked_select(z, mask)).tanh() + torch.maximum(z[mask], s)
    return y


@call
def modules(z, w, s):
    y, mask = w * 1, z > 0
    y[mask] = nn.ReLU()(nn.Softplus()(z[mask]) - 1)
    return y


@call
def integers(z, w, s):
    y, mask = torch.zeros(5, 4, dtype=torch.int32), z > 0
    y[mask] = (z[mask] * 10).int()
    return y + w * z


@call
def a_view(z, w, s):
    y, mask = w * 1, z[:, 0] > 0
    y[:, 1][mask] = z[:, 1][mask].sin()
    return y


@call
def index_put(z, w, s):
    mask = z > 0
    return torch.index_put(w * 1, (mask,), z[mask] * 3)


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.z = nn.Parameter(torch.randn(5, 4))
        self.w = nn.Parameter(torch.randn(5, 4))
        self.s = nn.Parameter(torch.tensor(1.5))
        self.z.data[0, 0] = 0  # (a logarithm has no finite gradient here)
        self.function = function

    def forward(self, x):
        y = self.function(self.z + x, self.w * 1, self.s)
        weights = torch.arange(1.0, y.numel() + 1).reshape(y.shape)
        return y, poptorch.identity_loss((y * weights).sum(), reduction="none")


@pytest.mark.parametrize("function", CALLS.values(), ids=CALLS)
def test_values_and_gradients(function):
    torch.manual_seed(1)
    net = Net(function)
    eager = copy.deepcopy(net)
    x = torch.randn(5, 4) / 4
    x[0, 0] = 0
    expected, loss = eager(x)
    loss.backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    values, _ = poptorch.trainingModel(net, optimizer=optimizer)(x)
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)
    for own, theirs in zip(net.parameters(), eager.parameters(), strict=True):
        gradient = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        torch.testing.assert_close(own.detach(), (theirs - gradient).detach(), rtol=1e-4, atol=1e-4)


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(4))

    def forward(self, x):
        mask = x > 0
        self.kept[mask] = x[mask] * 2
        return self.kept + 0


def test_a_buffer_is_changed_at_a_mask():
    model, eager = poptorch.inferenceModel(Kept()), Kept()
    for _ in range(3):
        x = torch.randn(4)
        torch.testing.assert_close(model(x), eager(x))


def test_the_mean_of_integers_is_refused_as_in_eager_pytorch():
    class Mean(nn.Module):
        def forward(self, x):
            return x[x > 0].mean()

    with pytest.raises(RuntimeError, match="could not infer output dtype"):
        poptorch.inferenceModel(Mean())(torch.arange(4))


def test_they_are_tensors():
    class Asking(nn.Module):
        def forward(self, x):
            z = x[x > 0]
            assert z.dim() == 1 and z.ndim == 1 and z.dtype == torch.float32
            assert not isinstance(z, nn.Parameter)
            return z.sum() if isinstance(z, torch.Tensor) and torch.is_tensor(z) else x.sum()

    x = torch.tensor([1.0, -2.0, 3.0])
    assert torch.equal(poptorch.inferenceModel(Asking())(x), Asking()(x))
