"""Indices outside a tensor: maybe an error, never a crash, and the next call is correct."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch

GOOD = torch.tensor([[0, 1], [1, 2], [2, 0]])
LOOKUPS = {
    "gather": lambda x, i: x.gather(1, i),
    "index_select": lambda x, i: x.index_select(0, i[:, 0]),
    "index": lambda x, i: x[i[:, 0], i[:, 1]],
    "embedding": lambda x, i: F.embedding(i, x),
    "one_hot": lambda x, i: F.one_hot(i, 3) * x[0],
    "scatter_add": lambda x, i: torch.zeros(3, 3).scatter_add(1, i, x),
}


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, x, i):
        return self._function(x, i)


@pytest.mark.parametrize("bad", [GOOD + 1, GOOD - 4, GOOD * 100_000], ids=["3", "-4", "200000"])
@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
def test_in_inference(h, lookup, bad):
    model = poptorch.inferenceModel(Function(lookup), h.make_options())
    x = torch.arange(9.0).view(3, 3)
    for _ in range(2):
        where = r"while running '.*' \(\w+, .*test_index_out_of_range\.py:\d+\): "
        with pytest.raises(poptorch.Error, match=where):
            model(x, bad)
        out = model(x, GOOD)
        assert torch.equal(out, lookup(x, GOOD).to(out.dtype))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, i, y):
        out = self.norm(self.table(i))
        return out, self.loss(out, y)


INDICES = torch.tensor([0, 1, 2, 3, 4, 0])
CLASSES = torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize("position", [0, 3, 5])
@pytest.mark.parametrize("culprit", ["index", "class"])
def test_in_training_with_accumulation(h, culprit, position):
    """A step that fails in the middle does not change the next step's update."""
    net = Classifier()
    model = h.train(net, h.make_options(1, 3))
    bad_indices, bad_classes = INDICES.clone(), CLASSES.clone()
    (bad_indices if culprit == "index" else bad_classes)[position] = 77
    with pytest.raises(poptorch.Error, match="while running '"):
        model(bad_indices, bad_classes)
    twin = copy.deepcopy(net)
    model(INDICES, CLASSES)
    for i, y in zip(INDICES.split(2), CLASSES.split(2), strict=True):
        (twin(i, y)[1] / 3).backward()
    expected = twin.table.weight - 0.125 * twin.table.weight.grad
    torch.testing.assert_close(net.table.weight, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(net.norm.running_mean, twin.norm.running_mean)
