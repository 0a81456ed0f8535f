"""Which node is the gradient of which other node."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.trace.graph.markers import MARK
from tests.unit.trace.traces import Net, X, aten, calls, trace_of


def test_every_activation_and_parameter_has_a_mark():
    traced = trace_of(Net(), X, training=True)
    assert sorted(traced.parameter_of.values()) == sorted(traced.parameters)
    marked = {node.target for node in traced.forward_of.values()}
    assert {aten.addmm.default, aten.tanh.default} <= marked
    keys = {node.args[1] for node in calls(traced, MARK)}
    assert keys <= traced.forward_of.keys() | traced.parameter_of.keys()


def test_a_frozen_parameter_has_no_gradient():
    net = Net()
    net.fc2.weight.requires_grad_(False)
    traced = trace_of(net, X, training=True)
    assert traced.gradients == ["fc1.weight", "fc1.bias", "fc2.bias"]


def test_a_parameter_without_influence_has_no_gradient():
    net = Net()
    net.spare = nn.Linear(2, 2)
    traced = trace_of(net, X, training=True)
    assert "spare.weight" in traced.parameters
    assert "spare.weight" not in traced.gradients


@pytest.mark.parametrize("cut", ["no_grad", "detach"])
def test_no_grad_and_detach(cut):
    class Cut(Net):
        def forward(self, x):
            if cut == "no_grad":
                with torch.no_grad():
                    x = self.fc1(x)
            else:
                x = self.fc1(x).detach()
            return poptorch.identity_loss(self.fc2(x), "sum")

    assert trace_of(Cut(), X, training=True).gradients == ["fc2.weight", "fc2.bias"]


def test_inputs_get_no_gradient():
    traced = trace_of(Net(), X, training=True)
    assert not any(node.op == "placeholder" for node in traced.forward_of.values())


def test_a_custom_autograd_function():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    class Custom(Net):
        def forward(self, x):
            return poptorch.identity_loss(Doubled.apply(self.fc1(x)), "sum")

    assert trace_of(Custom(), X, training=True).gradients == ["fc1.weight", "fc1.bias"]


def test_checkpointing_of_torch():
    class Checkpointed(Net):
        def forward(self, x):
            x = torch.utils.checkpoint.checkpoint(self.fc1, x, use_reentrant=False)
            return poptorch.identity_loss(self.fc2(x), "sum")

    traced = trace_of(Checkpointed(), X, training=True)
    assert traced.gradients == list(traced.parameters)
