"""Optimizers that keep the model, or ids of its parameters, are refused if a step uses them."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.parity.compare import quiet_options

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        return poptorch.identity_loss(self.fc(x).square().mean(), "none")


class Base(torch.optim.Optimizer):
    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 0.1})
        self.prepare(model)

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1 * self.factor(p))

    def prepare(self, model):
        pass

    def factor(self, p):
        return 1


class OfTheModel(Base):
    def prepare(self, model):
        self.model = model

    @torch.no_grad()
    def step(self, closure=None):
        for _, p in self.model.named_parameters():
            p.sub_(0.1 * p.grad)


class OfLayers(Base):
    def prepare(self, model):
        self.layers = list(model.children())

    def factor(self, p):
        return 2 if any(p is one.bias for one in self.layers) else 1


class OfIds(Base):
    def prepare(self, model):
        self.halved = {id(model.fc.bias)}

    def factor(self, p):
        return 0.5 if id(p) in self.halved else 1


class OfADictOfIds(Base):
    def prepare(self, model):
        self.factors = {id(p): 0.5 for p in model.parameters()}

    def factor(self, p):
        return self.factors[id(p)]


class OfOneId(Base):
    def prepare(self, model):
        self.last = id(model.fc.bias)

    def factor(self, p):
        return 2 if id(p) == self.last else 1


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (OfTheModel, "keeps the model in its attribute 'model'"),
        (OfLayers, "keeps the model in its attribute 'layers'"),
        (OfIds, "keeps the ids of parameters in its attribute 'halved'"),
        (OfADictOfIds, "keeps the ids of parameters in its attribute 'factors'"),
        (OfOneId, "keeps the ids of parameters in its attribute 'last'"),
    ],
)
def test_they_are_refused(kind, text):
    net = Net()
    model = poptorch.trainingModel(net, quiet_options(), kind(net))
    with pytest.raises(poptorch.Error, match=text):
        model(X)
    model.setOptimizer(torch.optim.Adagrad(net.parameters(), lr=0.1))
    before = net.fc.weight.detach().clone()
    model(X)
    assert not torch.equal(net.fc.weight, before)


class Unused(Base):
    """Keeps the model for something else, and another model."""

    def prepare(self, model):
        self.model, self.teacher, self.sizes = model, nn.Linear(1, 1), {1, 2}

    def factor(self, p):
        return 2 if p.dim() in self.sizes and self.teacher.in_features == 1 else 1


def test_a_model_that_the_step_does_not_use():
    eager, net = Net(), Net()
    optimizer = Unused(eager)
    model = poptorch.trainingModel(net, quiet_options(), Unused(net))
    for _ in range(2):
        optimizer.zero_grad()
        eager(X).backward()
        optimizer.step()
        model(X)
    for ours, theirs in zip(net.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
