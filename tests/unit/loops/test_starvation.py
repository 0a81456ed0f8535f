"""A loop that waits for data most of the time logs this once."""

import threading

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch import logs
from popsim_torch.loops import starvation


@pytest.fixture
def warnings(monkeypatch):
    """Collect the warnings, which come after the first millisecond of waiting here."""
    monkeypatch.setattr(starvation, "LEAST_SECONDS", 0.001)
    found = []
    monkeypatch.setattr(logs.python, "warning", lambda text, *args: found.append(text % args))
    return found


def slow(pause):
    while True:
        pause.wait(0.02)
        yield torch.ones(2)


def training(data):
    infeed = poptorch.InfeedQueue(data)

    @poptorch.function
    def run():
        poptorch.repeat(8, lambda total, x: total + x.sum(), inputs=torch.zeros(()), infeed=infeed)

    return run


def test_a_slow_dataset_is_named_once(warnings):
    run = training(slow(threading.Event()))
    for _ in range(3):
        run()
    (warning,) = warnings
    assert "A loop waited for data in " in warning
    assert "the data pipeline, not the device, is the limit" in warning


def test_waits_below_the_threshold_are_no_news(warnings, monkeypatch):
    monkeypatch.setattr(starvation, "LEAST_SHARE", 1.1)
    training(slow(threading.Event()))()
    assert warnings == []


def test_a_loop_without_data_is_not_watched(warnings):
    @poptorch.function
    def run():
        return poptorch.repeat(8, lambda total: total + 1, inputs=torch.zeros(()))

    assert run() == 8
    assert warnings == []
