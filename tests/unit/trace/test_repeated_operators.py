"""A trace that records repeated operators itself has the graph that PyTorch would record."""

import operator
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import popsim_torch as poptorch
from popsim_torch.private_torch.trees import tree_leaves
from popsim_torch.trace import tracer
from popsim_torch.trace.graph.repeated_operators import RepeatedOperators
from tests.unit.trace.traces import trace_of


class Repeats(nn.Module):
    """Calls each function several times, with the same shapes and with others."""

    def __init__(self, *functions):
        super().__init__()
        self.functions = functions
        self.weight = nn.Parameter(torch.ones(4, 6))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        for i in range(3):
            for function in self.functions:
                x = function(self, x) + x * i
        return x, poptorch.identity_loss(x.sum(), reduction="sum")


def in_place(_, x):
    y = x * 2
    y.add_(1).mul_(y)
    y[0] += 1
    y[:, 1:3].relu_()
    return y


def views(_, x):
    first, second = x.t().contiguous().view(2, 3, 4).unbind(0)
    return torch.cat([first.T, second.T], 1).expand(4, 6)


def several_results(_, x):
    values, places = x.max(1, keepdim=True)
    parts = x.split([2, 4], 1)
    return values + places + parts[0].sum() * parts[1].mean()


def scalars(_, x):
    return x * True + x * 1 + x / 2 + (x * 1.0).to(torch.float64).float() ** 2


def changed_shape(_, x):
    y = x.clone()
    y.t_()
    y.unsqueeze_(0)
    return y.squeeze(0).T


def of_the_host(_, x):
    return x + torch.tensor([1.0, 2, 3, 4, 5, 6]) + torch.arange(6)


def random(_, x):
    return F.dropout(x, 0.5) + torch.rand_like(x) + torch.rand(4, 1)


FUNCTIONS = {
    "weights": lambda self, x: F.linear(x, self.weight)[:, :1] + x @ self.weight.T @ self.weight,
    "norms": lambda self, x: self.norm(x),
    "complex": lambda _, x: torch.view_as_real(torch.view_as_complex(x.reshape(4, 3, 2)) * 2).view(
        4, 6
    ),
    **{
        function.__name__: function
        for function in (
            *(in_place, views, several_results, scalars),
            *(changed_shape, of_the_host, random),
        )
    },
}


def described(traced):
    """Return the nodes of a trace with all that later steps read."""

    def value_of(node):
        return [
            (one.shape, one.stride(), one.storage_offset(), one.dtype, one.fake_device)
            if isinstance(one, torch.Tensor)
            else one
            for one in tree_leaves(node.meta.get("val"))
        ]

    numbers = {node: i for i, node in enumerate(traced.graph_module.graph.nodes)}
    return [
        (
            node.op,
            str(node.target),
            str(torch.fx.node.map_arg((node.args, dict(node.kwargs)), numbers.__getitem__)),
            value_of(node),
            str(node.meta.get("custom")),
        )
        for node in numbers
    ]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_graph_is_that_of_pytorch(name, monkeypatch):
    module, x = Repeats(FUNCTIONS[name]), torch.ones(4, 6)
    ours = described(trace_of(module, x, training=True))
    monkeypatch.setattr(tracer, "RepeatedOperators", lambda _: nullcontext())
    theirs = described(trace_of(module, x, training=True))
    assert ours == theirs


def test_memory_is_shared_as_in_pytorch(monkeypatch):
    def sharing():
        traced = trace_of(Repeats(views, in_place), torch.ones(4, 6), training=True)
        seen = {}
        return [
            seen.setdefault(one.untyped_storage()._cdata, len(seen))
            for node in traced.graph_module.graph.nodes
            for one in tree_leaves(node.meta.get("val"))
            if isinstance(one, torch.Tensor)
        ]

    ours = sharing()
    monkeypatch.setattr(tracer, "RepeatedOperators", lambda _: nullcontext())
    assert ours == sharing()


def test_most_calls_of_a_deep_model_are_repeated(monkeypatch):
    asked = []
    call = RepeatedOperators._repeat
    monkeypatch.setattr(
        RepeatedOperators, "_repeat", lambda *args: (asked.append(args), call(*args))[1]
    )
    layers = [layer for _ in range(20) for layer in (nn.Linear(6, 6), nn.ReLU())]
    module = Repeats(lambda self, x: self.layers(x))
    module.layers = nn.Sequential(*layers)
    traced = trace_of(module, torch.ones(4, 6), training=True)
    made = [
        node
        for node in traced.graph_module.graph.nodes
        if node.op == "call_function"
        and node.target is not operator.getitem
        and node.target is not torch.ops.popsim.mark.default
    ]
    assert len(asked) > 0.9 * len(made)


def test_an_operator_without_results_may_be_called_again():
    class Asserts(torch.nn.Module):
        def forward(self, x):
            torch._assert_async((x < 9).all())
            torch._assert_async((x > 0).all())
            return x + 1

    model = poptorch.inferenceModel(Asserts())
    assert torch.equal(model(torch.ones(3)), torch.full((3,), 2.0))
    with pytest.raises(poptorch.Error, match="_assert_async"):
        model(-torch.ones(3))
