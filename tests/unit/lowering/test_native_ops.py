"""The operators with native ops on the device, and models that get these ops."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(3)
        self.fc = nn.Linear(12, 12)
        self.table = nn.Embedding(9, 12, padding_idx=2)
        self.layer_norm = nn.LayerNorm(12)
        self.group_norm = nn.GroupNorm(3, 12)
        self._function = function

    def forward(self, x, y):
        return poptorch.identity_loss(self._function(self, self.fc(x), y), "none")


CASES = {
    "sum": (lambda m, x, y: x.square().sum(), {"reduce"}),
    "mean": (lambda m, x, y: x.square().mean(0, keepdim=True).sum(-1).mean(), {"reduce"}),
    "amax": (lambda m, x, y: x.amax(1).mean() - x.amin(), {"reduce"}),
    "mse": (lambda m, x, y: F.mse_loss(x, torch.ones_like(x)), {"reduce", "map"}),
    "mse_sum": (lambda m, x, y: F.mse_loss(x, torch.ones_like(x), reduction="sum"), {"reduce"}),
    "mse_none": (lambda m, x, y: F.mse_loss(x, x * 2, reduction="none").mean(), {"reduce"}),
    "softmax": (lambda m, x, y: (x.softmax(1) * x).sum(), {"softmax", "softmax_grad"}),
    "softmax_0": (lambda m, x, y: (x.log_softmax(0) * x).sum(), {"softmax", "softmax_grad"}),
    "cross_entropy": (lambda m, x, y: F.cross_entropy(x, y), {"nll_loss", "cross_entropy_grad"}),
    "nll": (lambda m, x, y: F.nll_loss(x, y, reduction="sum"), {"nll_loss", "nll_loss_grad"}),
    "nll_none": (
        lambda m, x, y: (F.cross_entropy(x, y, reduction="none") * x[:, 0]).mean(),
        {"nll_loss", "cross_entropy_grad"},
    ),
    "layer_norm": (
        lambda m, x, y: (m.layer_norm(x) * x).sum(),
        {"layer_norm", "layer_norm_grad"},
    ),
    "group_norm": (
        lambda m, x, y: (m.group_norm(x.view(2, 12, -1)) * x.view(2, 12, -1)).sum(),
        {"group_norm", "group_norm_grad"},
    ),
    "attention": (
        lambda m, x, y: F.scaled_dot_product_attention(x[None], x[None], x[None]).sum(),
        {"softmax", "softmax_grad"},
    ),
    "embedding": (lambda m, x, y: (m.table(y) * x).sum(), {"embedding", "embedding_grad"}),
    "cat": (
        lambda m, x, y: (torch.cat([x, x * 2], 1) * torch.cat([x[:, :4], x], -1).sum()).sum(),
        {"cat", "into_zeros"},
    ),
    "select": (lambda m, x, y: (x[3] * x[2:5, 1:].sum()).sum(), {"into_zeros"}),
}


@pytest.mark.parametrize(("function", "kinds"), CASES.values(), ids=CASES)
def test_training_uses_them(function, kinds):
    model = Model(function)
    twin = copy.deepcopy(model)
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([0, 3, 2, 2, 1, 8, 5, 0])
    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    training = poptorch.trainingModel(
        model, options, poptorch.optim.SGD(model.parameters(), lr=0.1)
    )
    loss = training(x, y)
    expected = twin(x, y)
    expected.backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-5, msg=name)
    used = Counter(op.kind for op in training.compiled.host_program.graph.ops)
    assert kinds <= set(used)
    # The gradient of amax counts the largest elements.
    assert "aten" not in used or function is CASES["amax"][0]
