"""The contribution of each use of a tensor to its gradient."""

import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import OutputMode
from tests.options import make_options
from tests.unit.names.common import names_of

SCALE = 4.0


class Shared(nn.Module):
    """A model with a tensor that two operations use, and a weight that two operations use."""

    def __init__(self, in_place=False):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))
        self.in_place = in_place

    def forward(self, x):
        hidden = x * self.w  # operation 0
        left = hidden.sin()  # 1
        right = hidden * self.w  # 2
        total = left + right  # 3
        if self.in_place:
            total[0] = 0.0
        return poptorch.identity_loss(total, "sum")


def trained_on(x, anchors=(), in_place=False):
    torch.manual_seed(1)
    net = Shared(in_place)
    options = make_options(2)
    for name in anchors:
        options.anchorTensor(name, name, OutputMode.All)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1, loss_scaling=SCALE)
    model = poptorch.trainingModel(net, options, optimizer)
    model(x)
    model.copyWeightsToHost()
    return model, net.w


def partial_names(model):
    names = model.getTensorNames()
    return {n for n in names if n.startswith("Gradient___") and n[-1].isdigit() and "_" in n[-3:]}


def expected(x, lr=0.1):
    """Return the partial gradients of two updates, by name, in float64."""
    torch.manual_seed(1)
    w = Shared().w.detach().double()
    found = {name: [] for name in ("1_0", "2_0", "2_1", "0_1")}
    for batch in x.double().chunk(2):
        hidden = batch * w
        parts = {"1_0": SCALE * hidden.cos(), "2_0": SCALE * w.expand_as(hidden)}
        parts["2_1"] = (SCALE * hidden).sum(0)
        parts["0_1"] = ((parts["1_0"] + parts["2_0"]) * batch).sum(0)
        for name, value in parts.items():
            found[name].append(value)
        w = w - lr * (parts["2_1"] + parts["0_1"]) / SCALE
    return {f"Gradient___{name}": torch.cat(values) for name, values in found.items()}


def test_each_use_has_its_part():
    x = torch.randn(2 * 4, 3)
    plain, alone = trained_on(x)
    values = expected(x)
    assert partial_names(plain) == set(values)
    model, looked_at = trained_on(x, values)
    for name, value in values.items():
        found = model.getAnchoredTensor(name)
        torch.testing.assert_close(found.double(), value, rtol=1e-5, atol=1e-6)
    assert torch.equal(looked_at, alone)


def test_the_parts_add_up_to_the_gradient():
    x = torch.randn(2 * 4, 3)
    whole = {"Gradient___Mul:0": ("1_0", "2_0"), "Gradient___w": ("2_1", "0_1")}
    parts = [f"Gradient___{part}" for pair in whole.values() for part in pair]
    model, _ = trained_on(x, [*whole, *parts])
    for name, (one, other) in whole.items():
        total = sum(model.getAnchoredTensor(f"Gradient___{part}") for part in (one, other))
        torch.testing.assert_close(model.getAnchoredTensor(name), total)


def test_a_changed_tensor_has_parts_too():
    x = torch.randn(2 * 4, 3)
    plain, alone = trained_on(x, in_place=True)
    names = partial_names(plain)
    assert len(names) == 4
    model, looked_at = trained_on(x, names, in_place=True)
    assert all((model.getAnchoredTensor(name) != 0).any() for name in names)
    assert torch.equal(looked_at, alone)


def test_single_uses_have_none():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return poptorch.identity_loss((x * self.w).sin(), "sum")

    assert not any(name.startswith("Gradient___0_") for name in names_of(Chain(), torch.ones(2, 3)))
