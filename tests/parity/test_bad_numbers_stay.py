"""Infinities and NaN in layers reach the same numbers as in eager PyTorch, and no others.

Where a window is partly in the padding, PyTorch's kernels differ in whether a weight that is not
finite counts there (0 * infinity), so these numbers are left out for such weights.
"""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options

LAYERS = {
    "conv1d": (lambda: nn.Conv1d(3, 4, 5, padding=2, stride=2), (2, 3, 9)),
    "conv1d with dilation": (lambda: nn.Conv1d(3, 4, 3, padding=2, dilation=2), (2, 3, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, padding=1), (2, 3, 6, 6)),
    "conv2d with stride": (lambda: nn.Conv2d(3, 8, 3, padding=1, stride=2), (2, 3, 7, 7)),
    "conv2d of odd channels": (lambda: nn.Conv2d(17, 13, 3, padding=1), (3, 17, 5, 5)),
    "conv2d of small images": (lambda: nn.Conv2d(32, 32, 3, padding=1), (4, 32, 2, 2)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (2, 4, 6, 6)),
    "depthwise": (lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16), (2, 16, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(3, 4, 3, padding=1), (2, 3, 4, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, 2, 1, 1), (2, 3, 5, 5)),
    "linear": (lambda: nn.Linear(17, 33), (19, 17)),
    "wide linear": (lambda: nn.Linear(300, 257), (129, 300)),
    "one result": (lambda: nn.Linear(64, 1), (7, 64)),
}


class Trained(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        y = self.layer(x)
        return y, poptorch.identity_loss(y.sum(), "none")


def kinds(x):
    """Return 0 for finite numbers, and another number for each other one."""
    x = x.detach()
    return x.isnan() * 3 + (x == torch.inf) * 2 + (x == -torch.inf) * 1


def spoilt(x, place, bad):
    x = x.detach().clone()
    flat = x.view(-1)
    flat[0 if place == "first" else -1] = bad
    return x


@pytest.mark.parametrize("bad", [torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("name", LAYERS)
def test_bad_inputs_and_their_gradients(name, place, bad):
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    net = Trained(make())
    twin = copy.deepcopy(net)
    x = spoilt(torch.randn(shape), place, bad)
    expected, loss = twin(x)
    loss.backward()
    options = make_options()
    options.anchorTensor("gradient", "Gradient___layer.weight")
    model = poptorch.trainingModel(net, options, torch.optim.SGD(net.parameters(), lr=0.1))
    found = model(x)[0]
    assert torch.equal(kinds(found), kinds(expected))
    gradient = model.getAnchoredTensor("gradient")
    assert torch.equal(kinds(gradient), kinds(twin.layer.weight.grad))


@pytest.mark.parametrize("bad", [torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("name", LAYERS)
def test_bad_weights_spoil_no_other_channel(name, place, bad):
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer = make()
    x = torch.randn(shape)
    with torch.no_grad():
        good = layer(x)
        layer.weight.copy_(spoilt(layer.weight, place, bad))
        counted = copy.deepcopy(layer)  # how many times the bad weight meets a number
        counted.weight.copy_(~counted.weight.isfinite())
        counted.bias.zero_()
        meets = counted(torch.ones(shape)) > 0
        expected = layer(x)
        found = poptorch.inferenceModel(layer, make_options())(x)
    assert torch.equal(kinds(found)[meets], kinds(expected)[meets])
    axis = found.dim() - 1 if isinstance(layer, nn.Linear) else 1
    touched = meets.movedim(axis, 0).flatten(1).any(1)
    others = (~touched).nonzero().flatten()
    torch.testing.assert_close(
        found.index_select(axis, others), good.index_select(axis, others), rtol=1e-4, atol=1e-5
    )
