"""First calls, which compile, from several threads."""

import threading

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.unit.executor.host_calls import X

pytestmark = pytest.mark.timeout(120)


class Slow(nn.Module):
    """Waits in forward: another thread can do something during the trace."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(X.shape[-1], 2)
        self.is_traced, self.may_end = threading.Event(), threading.Event()

    def forward(self, x):
        self.is_traced.set()
        assert self.may_end.wait(60)
        return self.fc(x)


@pytest.mark.parametrize("use", ["__call__", "compile"])
def test_another_thread_is_refused_during_the_first_call(use):
    net = Slow()
    model, results = poptorch.inferenceModel(net), []
    first = threading.Thread(target=lambda: results.append(model(X)))
    first.start()
    try:
        assert net.is_traced.wait(60)
        with pytest.raises(poptorch.Error, match="another thread is using the executor"):
            getattr(model, use)(X)
    finally:
        net.may_end.set()
        first.join()
    expected = net.fc(X)
    assert torch.allclose(results[0], expected)
    assert torch.allclose(model(X), expected)


def test_a_failed_first_call_lets_other_threads_in():
    net = nn.Linear(3, 2)
    model = poptorch.inferenceModel(net)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(torch.ones(2, 4))
    x, results = torch.ones(2, 3), []
    other = threading.Thread(target=lambda: results.append(model(x)))
    other.start()
    other.join()
    assert torch.allclose(results[0], net(x))


def test_another_executor_of_the_same_module_waits():
    net = Slow()
    other, model = poptorch.inferenceModel(net), poptorch.inferenceModel(net)
    net.may_end.set()
    other.compile(X)
    other.detachFromDevice()
    net.may_end.clear()
    net.is_traced.clear()
    results = []
    first = threading.Thread(target=lambda: results.append(model(X)))
    first.start()
    assert net.is_traced.wait(60)
    second = threading.Thread(target=lambda: results.append(other(X)))
    second.start()  # it uploads the weights, which are traced tensors now
    second.join(0.2)
    assert not results
    net.may_end.set()
    first.join()
    second.join()
    expected = net.fc(X)
    assert len(results) == 2 and all(torch.allclose(one, expected) for one in results)
