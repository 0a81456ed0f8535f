"""Threads that forward starts, and other threads while a model is compiled."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch
from popsim_torch.executor import compile_lock
from tests.parity.compare import quiet_options


class Net(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.calls = {"call": call}  # (models share it)

    def forward(self, x):
        out = self.calls["call"](self, x)
        return out, F.mse_loss(out, x)


def in_a_pool(net, x):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda layer: layer(x), [net.a, net.b])
    return first + second


def in_a_thread(net, x):
    found = {}
    thread = threading.Thread(target=lambda: found.update(a=net.a(x)))
    thread.start()
    thread.join()
    return found["a"]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("call", [in_a_pool, in_a_thread])
def test_layers_in_threads(call, training):
    net = Net(call)
    model = (
        poptorch.trainingModel(net, quiet_options(), torch.optim.SGD(net.parameters(), lr=0.1))
        if training
        else poptorch.inferenceModel(net, quiet_options())
    )
    x = torch.ones(3, 2)
    with pytest.raises(poptorch.Error, match="call the layers one after the other"):
        model(x)
    net.calls["call"] = lambda net, x: net.a(x) + net.b(x)
    expected = (net.a(x) + net.b(x)).detach()
    torch.testing.assert_close(model(x)[0], expected)


def test_a_thread_that_computes_other_things():
    def logs(net, x):
        thread = threading.Thread(target=lambda: torch.ones(2).sum().item())
        thread.start()
        thread.join()
        return net.a(x)

    net = Net(logs)
    x = torch.ones(3, 2)
    torch.testing.assert_close(
        poptorch.inferenceModel(net, quiet_options())(x)[0], net.a(x).detach()
    )


def test_a_thread_that_compiles_while_forward_waits_for_it(monkeypatch):
    monkeypatch.setattr(compile_lock, "_PATIENCE", 0.1)
    other = poptorch.inferenceModel(nn.Linear(2, 2), quiet_options())
    errors = []

    def calls(x):
        try:
            other(x)
        except poptorch.Error as error:
            errors.append(str(error))

    def waits(net, x):
        thread = threading.Thread(target=calls, args=(torch.ones(1, 2),))
        thread.start()
        thread.join()
        return net.a(x)

    poptorch.inferenceModel(Net(waits), quiet_options())(torch.ones(3, 2))
    assert len(errors) == 1
    assert "Only one model is compiled at a time" in errors[0]
    assert other(torch.ones(1, 2)).shape == (1, 2)


def test_a_thread_that_computes_with_the_model_while_it_is_compiled():
    errors = []

    def calls(net):
        try:
            net.a(torch.ones(1, 2))
        except poptorch.Error as error:
            errors.append(str(error))

    def waits(net, x):
        thread = threading.Thread(target=calls, args=(net,))
        thread.start()
        thread.join()
        return net.a(x)

    net = Net(waits)
    poptorch.inferenceModel(net, quiet_options())(torch.ones(3, 2))
    assert len(errors) == 1
    assert "that another thread compiles" in errors[0]


def test_a_child_process_compiles_while_a_thread_of_its_parent_does():
    has_lock, is_over = threading.Event(), threading.Event()

    def holds():
        with compile_lock.compile_lock:
            has_lock.set()
            is_over.wait()

    thread = threading.Thread(target=holds)
    thread.start()
    has_lock.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # (ends a child that waits)
        with compile_lock.compile_lock:
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    is_over.set()
    thread.join()
    assert status == 0
