"""Anchors change nothing of what is computed."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import OutputMode
from tests.parity.anchors.common import make_batch, make_net, make_options


@pytest.mark.parametrize("d, ga", [(1, 1), (1, 3), (4, 2)])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_anchors_never_change_results(d, ga, optimizer):
    def train(anchored):
        net = make_net()
        options = make_options(d, ga)
        options.outputMode(OutputMode.All)
        if anchored:
            for i, name in enumerate(all_names):
                options.anchorTensor(f"a{i}", name, list(OutputMode)[(0, 2, 3)[i % 3]])
        kind = getattr(poptorch.optim, optimizer)
        model = poptorch.trainingModel(net, options, kind(net.parameters(), lr=0.125))
        results = [model(*make_batch(d, ga, seed)) for seed in range(3)]
        return model.getTensorNames(), results, net.state_dict()

    all_names, outputs, weights = train(anchored=False)
    _, anchored_outputs, anchored_weights = train(anchored=True)
    for ours, theirs in zip(outputs, anchored_outputs, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
    for name, weight in weights.items():
        assert torch.equal(weight, anchored_weights[name]), name


@pytest.mark.parametrize("name", ["input", "fc/Gemm:0", "Gradient___fc/Gemm:0", "fc.weight"])
def test_anchors_never_change_dropout(name):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            x = nn.functional.dropout(self.fc(x), 0.5)
            x = nn.functional.dropout(x + torch.rand_like(x), 0.5)
            return x, poptorch.identity_loss(x, "sum")

    def train(anchored):
        torch.manual_seed(0)
        net = Net()
        options = make_options(1, 2)
        options.randomSeed(5)
        if anchored:
            options.anchorTensor("it", name, OutputMode.All)
        model = poptorch.trainingModel(net, options)
        x = torch.randn(16, 4)
        return [model(x)[0] for _ in range(2)]

    for ours, theirs in zip(train(False), train(True), strict=True):
        assert torch.equal(ours, theirs)


def test_every_listed_name_can_be_anchored():
    net = make_net()
    x, y = make_batch(2, 3)
    plain = poptorch.trainingModel(net, make_options(2, 3))
    plain.compile(x, y)
    names = plain.getTensorNames()
    plain.destroy()
    options = make_options(2, 3)
    for name in names:
        options.anchorTensor(name, name, OutputMode.All)
    model = poptorch.trainingModel(net, options)
    model(x, y)
    for name in names:
        assert model.getAnchoredTensor(name).isfinite().all(), name
