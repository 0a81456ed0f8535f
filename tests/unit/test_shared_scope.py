"""A scope of the whole process: the first thread begins it, and the last thread ends it."""

import threading
import time
from contextlib import contextmanager

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch.shared_scope import SharedScope


def test_scopes_that_overlap():
    events = []

    @contextmanager
    def change():
        events.append("begins")
        yield
        events.append("ends")

    scope = SharedScope(change)
    scope.__enter__()
    scope.__enter__()
    scope.__exit__(None, None, None)
    assert events == ["begins"]
    scope.__exit__(None, None, None)
    with pytest.raises(KeyError), scope:
        raise KeyError
    assert events == ["begins", "ends"] * 2


def test_functions_that_are_recorded_at_the_same_time_leave_python_and_torch_as_they_were():
    """The first thread to begin is the first one to end."""
    second_began, first_ended = threading.Event(), threading.Event()
    clock, step = time.time, torch.optim.lr_scheduler.StepLR.step

    def add_one(x):
        return x + 1

    @poptorch.function
    def first(x):
        second_began.wait(20)
        return poptorch.repeat(2, add_one, x)

    @poptorch.function
    def second(x):
        second_began.set()
        first_ended.wait(20)
        return poptorch.repeat(3, add_one, x)

    results = []
    threads = [
        threading.Thread(target=lambda f=f: results.append(f(torch.zeros(()))))
        for f in (first, second)
    ]
    threads[0].start()
    threads[1].start()
    threads[0].join(20)
    first_ended.set()
    threads[1].join(20)
    assert sorted(float(result) for result in results) == [2, 3]
    assert time.time is clock and torch.optim.lr_scheduler.StepLR.step is step

    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.ones(3))
    assert len(graphs) == 1
