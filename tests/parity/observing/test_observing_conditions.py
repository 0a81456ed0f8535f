"""Conditions on records end a run, or call a function."""

import os
import signal
import threading
import time

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch.statistics import (
    Counts,
)
from tests.parity.observing.models import (
    BATCH,
    GA,
    OPTIMIZERS,
    D,
    Kept,
    Model,
    data,
    options_of,
    same,
)


@pytest.mark.parametrize("calls", ["many short ones", "a long one"])
def test_a_condition_ends_the_run(calls):
    long = calls == "a long one"
    model, options = Model(), options_of()
    options.deviceIterations(30_000 if long else D).outputMode(poptorch.OutputMode.Final)
    options.observe(
        "Gradient___layers.2.weight",
        every=1,
        when=lambda record: record.step >= 5 and record.statistics.norm > 0,
    )
    training = poptorch.trainingModel(model, options, OPTIMIZERS["sgd"](model))
    rows = BATCH * GA * (30_000 if long else D)
    x, y = torch.randint(0, 10, (rows,)), torch.randint(0, 3, (rows,))
    with pytest.raises(poptorch.RecordError, match=r"Gradient___layers.2.weight.*iteration 5") as e:
        for _ in range(1 if long else 100_000):
            training(x, y)
    assert e.value.record.step == 5
    assert training.observing().requests
    done = training.compiled.executable.num_iterations
    assert done == 2 * D if not long else done > 5
    training(x, y)  # a condition ends a run once


def test_a_condition_calls_a_function(caplog):
    found = []
    options = options_of()
    options.observe("*Relu:0", Counts(), every=1, when=lambda r: r.step == 2, then=found.append)
    options.observe("*Relu:0", Counts(), every=1, when=lambda r: r.no_such_thing)
    model = Model()
    training = poptorch.trainingModel(model, options, OPTIMIZERS["sgd"](model))
    for x, y in data():
        training(x, y)
    training.observations()  # what is left
    names = {"layers/3/Relu:0", "Gradient___layers/3/Relu:0"}
    assert {record.name for record in found} == names and len(found) == 2 * GA
    assert caplog.text.count("no_such_thing") == 1


def test_watch_and_observe_together():
    class Spoilt(Model):
        def forward(self, x, y):
            out, loss = super().forward(x, y)
            return out, loss + 0 / x.sum()

    model, options = Spoilt(), options_of()
    options.observe("*", every=1).watch()
    training = poptorch.trainingModel(model, options, OPTIMIZERS["sgd"](model))
    x, y = data()[0]
    training(x, y)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(poptorch.BadNumberError):
        training(x * 0, y)
    same(model.state_dict().values(), before.values())


def test_the_first_record_that_meets_a_condition_counts():
    options = options_of().observe("Gradient___*", every=1, when=lambda r: r.step == 3)
    options.observe("layers.2.weight", every=1, when=lambda r: r.step == 1)
    options.observe("layers.5.weight", every=1, when=lambda r: r.step == 2)
    model = Model()
    training = poptorch.trainingModel(model, options, OPTIMIZERS["sgd"](model))
    with pytest.raises(poptorch.RecordError, match="iteration 1:") as caught:
        training(*data()[0])
    assert caught.value.record.name == "layers.2.weight"


@pytest.mark.parametrize("where", ["when", "then"])
def test_what_ends_a_program_ends_the_call(where):
    def end(record):
        if record.step == 2:
            raise SystemExit(5)
        return where == "then"

    asks = {"when": end} if where == "when" else {"when": lambda r: True, "then": end}
    model, options = Model(), options_of().observe("layers.2.weight", every=1, **asks)
    training = poptorch.trainingModel(model, options, OPTIMIZERS["sgd"](model))
    sink = Kept()
    training.add_sink(sink)
    with pytest.raises(SystemExit):
        training(*data()[0])
    training(*data()[1])
    training.close_sinks()
    steps = [r.step for r in sink.records]
    assert steps == sorted(steps) and set(steps) == {*range(D), *range(steps[-1] + 1)}


class Slow(Kept):
    def write_records(self, records):
        time.sleep(0.3)
        super().write_records(records)


def test_a_slow_sink_does_not_slow_down_a_model_with_conditions():
    model = Model()
    options = options_of().observe("layers.2.weight", every=1, when=lambda r: False)
    training = poptorch.trainingModel(model, options, OPTIMIZERS["sgd"](model))
    sink = Slow()
    training.add_sink(sink)
    training(*data()[0])
    began = time.monotonic()
    for _ in range(40):
        training(*data()[0])
    assert time.monotonic() - began < 6  # 12 s, if each call waited for the sink
    training.close_sinks()
    assert [r.step for r in sink.records] == list(range(41 * D))


@pytest.fixture
def interrupts():
    """Ctrl-C raises KeyboardInterrupt, which background jobs of a shell ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupts_lose_no_record(interrupts):
    model = Model()
    options = options_of().observe("*", every=1, when=lambda r: r.statistics.nans > 0)
    training = poptorch.trainingModel(model, options, OPTIMIZERS["sgd"](model))
    sink = Kept()
    training.add_sink(sink)
    x, y = data()[0]
    training(x, y)
    for number in range(8):
        timer = threading.Timer(0.05 + 0.013 * number, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            while True:
                training(x, y)
        timer.join()
    training(x, y)
    training.close_sinks()
    steps = {r.step for r in sink.records}
    assert steps == set(range(max(steps) + 1))
    kept = {r.step for r in training.observations()}
    assert kept == set(range(min(kept), max(steps) + 1))


def test_a_condition_is_new_with_each_program():
    model, options = Model(), options_of()
    options.observe("layers.2.weight", every=1, when=lambda r: r.step == 1)
    training = poptorch.trainingModel(model, options, OPTIMIZERS["sgd"](model))
    for _ in range(2):
        with pytest.raises(poptorch.RecordError):
            training(*data()[0])
        training(*data()[0])
        training.destroy()


def test_an_alarm_ends_with_its_program():
    model, options = Model(), options_of().observe("layers.2.weight", every=1)
    training = poptorch.trainingModel(model, options, OPTIMIZERS["sgd"](model))
    training(*data()[0])
    training._device.ring(poptorch.Error("too late"))
    training.destroy()
    training(*data()[0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_looks_at_conditions_itself():
    model, options = Model(), options_of()
    options.observe("layers.2.weight", every=1, when=lambda r: r.step >= 2 * D + 1)
    training = poptorch.trainingModel(model, options, OPTIMIZERS["sgd"](model))
    training(*data()[0])
    child = os.fork()
    if child == 0:
        idle = not any("records" in one.name for one in threading.enumerate())
        training(*data()[0])
        try:
            training(*data()[0])
        except poptorch.RecordError as error:
            os._exit(7 if idle and error.record.step == 2 * D + 1 else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
