"""Parameters of a model as its executor shows them."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import CommGroupType, VariableRetrievalMode
from tests.unit.executor.nets import infer, train

ONE = VariableRetrievalMode.OnePerGroup


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 3), 2.0))
        self.bias = nn.Parameter(torch.tensor(1.0))
        self.turned = nn.Parameter(torch.zeros(3, 2).t())
        self.register_parameter("none", None)
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        out = x * self.weight + self.bias
        return out, poptorch.identity_loss(out.sum(), "none")


def test_a_parameter_at_the_top_is_shown_by_a_proxy():
    net = Scale()
    for model in (infer(net), train(net)):
        proxy = model.weight
        assert not isinstance(proxy, torch.Tensor)
        assert proxy.shape == (2, 3)
        assert torch.equal(proxy.data, torch.full((2, 3), 2.0))
        assert proxy.sum().item() == 12
        assert proxy.requires_grad
        assert "ParameterProxy(weight: Parameter containing" in repr(proxy)
        assert model.none is None
        assert type(copy.copy(proxy)) is type(proxy)
        with pytest.raises(AttributeError):
            _ = proxy.missing


def test_parameters_inside_are_themselves():
    net = Scale()
    assert infer(net).inner.weight is net.inner.weight
    assert isinstance(infer(net).model.weight, nn.Parameter)


def test_a_proxy_shows_trained_values():
    net = Scale()
    model = poptorch.trainingModel(net, None, poptorch.optim.SGD(net.parameters(), lr=1.0))
    model(torch.ones(2, 3))
    assert torch.equal(model.weight.data, torch.full((2, 3), 1.0))


@pytest.mark.parametrize("mode", list(VariableRetrievalMode))
def test_one_group_of_all_replicas_is_what_there_is(mode):
    net = Scale()
    model = infer(net)
    model.weight.replicaGrouping(CommGroupType.All, 0, mode)
    assert torch.equal(model(torch.ones(2, 3))[0], torch.full((2, 3), 3.0))


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("bias", (CommGroupType.All, 0, ONE), "no dimension"),
        ("turned", (CommGroupType.All, 0, ONE), "contiguous"),
        ("weight", (CommGroupType.Consecutive, 3, ONE), "divide the replication factor, 1"),
        ("weight", (CommGroupType.Consecutive, 0, ONE), "divide the replication factor, 1"),
        ("weight", (CommGroupType.NoGrouping, 0, ONE), r"1 replica forms 1 group.*\(1, \.\.\.\)"),
        ("weight", (CommGroupType.Orthogonal, 1, ONE), r"1 replica forms 1 group.*\(1, \.\.\.\)"),
    ],
)
def test_groups_that_cannot_be(name, arguments, text):
    model = infer(Scale())
    with pytest.raises(poptorch.Error, match=text):
        getattr(model, name).replicaGrouping(*arguments)


@pytest.mark.parametrize(
    "arguments", [(0, 1, ONE), (CommGroupType.All, 1, 0), (CommGroupType.All, 1.0, ONE)]
)
def test_arguments_of_other_types(arguments):
    with pytest.raises(AssertionError, match=r"weight\.replicaGrouping"):
        infer(Scale()).weight.replicaGrouping(*arguments)


def test_groups_are_chosen_before_compilation():
    model = infer(Scale())
    model.compile(torch.ones(2, 3))
    with pytest.raises(poptorch.Error, match="compiled already"):
        model.weight.replicaGrouping(CommGroupType.All, 0, ONE)
