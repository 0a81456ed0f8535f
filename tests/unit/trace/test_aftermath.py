"""Tracing changes nothing that stays after it."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from popsim_torch.errors import Error
from popsim_torch.trace import check_traceable
from tests.unit.trace.traces import Function, Net, X, trace_of


def test_the_module_is_as_before():
    net = Net()
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    trace_of(net, X, training=True)
    after = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    assert list(after) == list(tensors)
    for name, tensor in after.items():
        assert tensor is tensors[name]
        assert torch.equal(tensor, values[name])
        assert tensor.grad is None


@pytest.mark.parametrize("shared", ["module", "weight", "buffer"])
def test_a_shared_part_is_as_before(shared):
    net = Net()
    net.again = nn.Linear(4, 5)
    if shared == "module":
        net.again = net.fc1
    elif shared == "weight":
        net.again.weight = net.fc1.weight
    else:
        net.again.register_buffer("shift", net.shift)
    before = [(n, id(p)) for n, p in net.named_parameters(remove_duplicate=False)]
    buffers = [(n, id(b)) for n, b in net.named_buffers(remove_duplicate=False)]
    trace_of(net, X, training=True)
    assert [(n, id(p)) for n, p in net.named_parameters(remove_duplicate=False)] == before
    assert [(n, id(b)) for n, b in net.named_buffers(remove_duplicate=False)] == buffers


def test_the_module_is_as_before_when_forward_fails():
    class Fails(Net):
        def forward(self, x):
            super().forward(x)
            raise KeyError("ours")

    net = Fails()
    parameters = dict(net.named_parameters())
    with pytest.raises(KeyError, match="ours"):
        trace_of(net, X, training=True)
    assert all(parameter is parameters[n] for n, parameter in net.named_parameters())


def test_torch_is_as_before():
    saved = F.has_torch_function, F.has_torch_function_unary, torch.is_grad_enabled()
    with pytest.raises(ZeroDivisionError):
        trace_of(Function(lambda x: x * (1 / 0)), X)
    trace_of(Net(), X, training=True)
    assert saved == (F.has_torch_function, F.has_torch_function_unary, torch.is_grad_enabled())
    assert not torch.overrides._get_current_function_mode_stack()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert float(torch.ones(3).sum()) == 3.0


def test_hooks_of_modules_run_while_tracing_only():
    net = Net()
    seen = []
    net.fc1.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    traced = trace_of(net, X)
    assert seen == [(2, 5)]
    assert torch.nn.modules.module._global_forward_hooks == {}
    assert torch.nn.modules.module._global_forward_pre_hooks == {}
    assert traced.num_outputs == 2


def test_a_tensor_of_an_earlier_trace():
    """Such a tensor has no value: an error is better than zeros."""
    kept = []

    def function(x):
        if not kept:
            kept.append(x * 2)
        return x + kept[0]

    trace_of(Function(function), X)
    with pytest.raises(Error):
        trace_of(Function(function), X)


def test_attributes_that_forward_sets_to_tensors_are_put_back():
    class Stores(Net):
        def __init__(self):
            super().__init__()
            self.seen = None

        def forward(self, x):
            self.seen = self.fc1(x)
            self.fc1.extra = [self.seen]
            self.count = 3
            return super().forward(x)

    net = Stores()
    trace_of(net, X)
    assert net.seen is None
    assert not hasattr(net.fc1, "extra")
    assert net.count == 3


def test_random_numbers_of_the_host_are_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    trace_of(Function(lambda x: x + torch.randn(4)), X)
    assert torch.equal(torch.rand(2), expected)


class Failing(Net):
    def forward(self, x):
        super().forward(x)
        raise KeyError("ours")


@pytest.mark.parametrize("kind", [Net, Failing])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_trace_keeps_no_parameter_alive(kind, training):
    def trace_once():
        net = kind()
        with contextlib.suppress(KeyError):
            trace_of(net, X, training=training)
        return [weakref.ref(parameter) for parameter in net.parameters()]

    alive = trace_once()
    gc.collect()
    assert [reference() for reference in alive] == [None] * 4


def test_tracing_inside_of_no_grad():
    with torch.no_grad():
        traced = trace_of(Net(), X, training=True)
    assert traced.gradients == list(traced.parameters)


def test_tracing_twice_gives_the_same_graph():
    net = Net()
    one, two = (trace_of(net, X, training=True) for _ in range(2))
    assert str(one.graph_module.graph) == str(two.graph_module.graph)


def test_a_lazy_module():
    with pytest.raises(Error, match="lazy"):
        check_traceable(nn.LazyLinear(3))
