"""Tensors of which a part is replaced: slice_scatter, select_scatter, slices changed in place."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, part):
        return self.function(x, part)


PARTS = {
    "in the middle": (lambda x, p: torch.slice_scatter(x, p, 1, 1, 4), (4, 3, 5)),
    "everything": (lambda x, p: torch.slice_scatter(x, p, 1, 0, 6), (4, 6, 5)),
    "at the end": (lambda x, p: torch.slice_scatter(x, p, -1, 2, None), (4, 6, 3)),
    "at the beginning": (lambda x, p: torch.slice_scatter(x, p, end=1), (1, 6, 5)),
    "from behind": (lambda x, p: torch.slice_scatter(x, p, 0, -2, 100), (2, 6, 5)),
    "of another layout": (
        lambda x, p: torch.slice_scatter(x.transpose(0, 1), p.transpose(0, 2), 2, 1, 3),
        (2, 4, 6),
    ),
    "a row": (lambda x, p: torch.select_scatter(x, p, 1, -2), (4, 5)),
    "a row of another layout": (
        lambda x, p: torch.select_scatter(x.transpose(0, 2), p.t(), 0, 3),
        (4, 6),
    ),
    "the last axis": (lambda x, p: torch.select_scatter(x, p, -1, 0), (4, 6)),
}


def kinds_of(model):
    return {op.kind for op in model._device.require_compiled("").program.graph.ops}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_a_part(name, dtype):
    function, shape = PARTS[name]
    x, part = (torch.randint(2, size, dtype=torch.int32).to(dtype) for size in ((4, 6, 5), shape))
    model = poptorch.inferenceModel(Model(function))
    assert torch.equal(model(x, part), function(x, part))
    assert kinds_of(model) == {"cat", "anchor"}


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x, p: torch.slice_scatter(x, p, 1, 0, 6, 2), (4, 3, 5)),
        (lambda x, p: torch.slice_scatter(x, p[:, :0], 1, 3, 3), (4, 3, 5)),
    ],
    ids=["every second", "nothing"],
)
def test_others_are_right_too(function, shape):
    x, part = torch.randn(4, 6, 5), torch.randn(shape)
    assert torch.equal(poptorch.inferenceModel(Model(function))(x, part), function(x, part))


class Shifted(nn.Module):
    """Layers whose results are changed in place, as in attention with relative positions."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x, target):
        y = self.first(x)
        y[:, 1:] += self.second(x)[:, :-1]
        y[:, 0] *= 2
        y[..., -1] = y[..., 0]
        return nn.functional.mse_loss(y, target)


def test_in_place_and_gradients():
    net = Shifted()
    reference = copy.deepcopy(net).double()
    model = poptorch.trainingModel(net, optimizer=torch.optim.SGD(net.parameters(), 0.1))
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    for seed in range(3):
        x, target = torch.randn(2, 4, 6, 5, generator=torch.Generator().manual_seed(seed))
        loss = model(x, target)
        optimizer.zero_grad()
        expected = reference(x.double(), target.double())
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=1e-7)
    model.copyWeightsToHost()
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-7)
