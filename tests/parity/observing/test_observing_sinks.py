"""Sinks get every record while a model runs, and when it ends."""

import copy
import gc
import os
import threading
import time

import pytest
from torch import nn

import popsim_torch as poptorch
from popsim_torch.executor import observed
from tests.parity.observing.models import (
    CALLS,
    GA,
    OPTIMIZERS,
    D,
    Kept,
    Model,
    data,
    everything,
    nothing,
    options_of,
    wrap,
)


def test_sinks_get_every_record_while_the_model_runs():
    _, training = wrap(everything(1))
    sink = Kept()
    training.add_sink(sink)
    x, y = data()[0]
    training(x, y)
    deadline = time.monotonic() + 20
    while not sink.records and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sink.threads == {"popsim_torch sinks"}
    training(x, y)
    training.close_sinks()
    assert sink.closed == 1
    records = training.observations()
    assert [(r.name, r.step, r.micro_batch) for r in records] == [
        (r.name, r.step, r.micro_batch) for r in sink.records
    ]
    assert {r.step for r in sink.records} == set(range(2 * D))


def test_a_failing_sink_stops_nothing(caplog):
    class Failing(Kept):
        def write_records(self, records):
            raise OSError("no space left")

    _, training = wrap(everything(1))
    other = Kept()
    training.add_sink(Failing())
    training.add_sink(other)
    for x, y in data():
        training(x, y)
    training.close_sinks()
    assert caplog.text.count("no space left") == 1
    assert len({r.step for r in other.records}) == D * CALLS


def test_destroy_passes_on_what_is_left():
    _, training = wrap(everything(1))
    sink = Kept()
    training.add_sink(sink)
    training(*data()[0])
    training.destroy()
    assert len({r.step for r in sink.records}) == D
    training(*data()[0])  # compiles again
    training.close_sinks()
    assert sink.closed == 1
    assert len([r for r in sink.records if r.step == 0 and r.name == "input"]) == 2 * GA


def test_a_copy_observes_on_its_own():
    _, training = wrap(everything(1))
    training(*data()[0])
    twin = copy.deepcopy(training)
    assert not twin.observations()
    twin(*data()[0])
    assert twin.observations() and training.observations()


def test_recorded_runs_are_equal(tmp_path):
    for name in "ab":
        _, training = wrap(nothing)
        training.record(tmp_path / name, every=2, meta={"run": name})
        for x, y in data():
            training(x, y)
        training.destroy()
        training.close_sinks()
    runs = [poptorch.Run(tmp_path / name) for name in "ab"]
    assert runs[0].steps == list(range(0, D * CALLS, 2))
    assert runs[0].meta["run"] == "a"
    difference = poptorch.compare(*runs)
    assert difference.first is None


def test_a_change_in_one_line_is_found_at_its_tensor(tmp_path):
    class Changed(Model):
        def forward(self, x, y):
            out = x
            for number, layer in enumerate(self.layers):
                out = layer(out)
                if number == 6 and self.change:
                    out = out * 1.0001
            return out, nn.functional.cross_entropy(out, y)

    for change in (False, True):
        model = Changed()
        model.change = change
        training = poptorch.trainingModel(model, options_of(), OPTIMIZERS["adam"](model))
        training.record(tmp_path / str(change))
        training(*data()[0])
        training.close_sinks()
    difference = poptorch.compare(
        *(poptorch.Run(tmp_path / str(change)) for change in (False, True))
    )
    assert (difference.first.step, difference.first.micro_batch) == (0, 0)
    assert difference.first.name == "layers/7/Gemm:0"


def test_an_executor_that_nobody_keeps_passes_on_what_is_left():
    _, training = wrap(everything(1))
    sink = Kept()
    training.add_sink(sink)
    training(*data()[0])
    del training
    gc.collect()
    assert sink.closed == 1
    assert {r.step for r in sink.records} == set(range(D))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_has_no_sinks_and_does_not_hang():
    _, training = wrap(everything(1))
    sink = Kept()
    training.add_sink(sink)
    x, y = data()[0]
    for _ in range(5):
        training(x, y)
        child = os.fork()
        if child == 0:
            before = len(sink.records)
            training.observations()
            training.close_sinks()
            os._exit(7 if len(sink.records) == before and not sink.closed else 1)
        deadline = time.monotonic() + 60
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(ended[1]) == 7
    training.close_sinks()
    assert {r.step for r in sink.records} == set(range(5 * D))


def test_an_executor_may_go_while_its_records_are_read(monkeypatch):
    make = observed._Batch
    nobody_keeps_it = threading.Event()

    def make_and_collect(*args):
        nobody_keeps_it.wait(60)
        gc.collect()  # as it may run at any time, in the thread of the reader
        return make(*args)

    monkeypatch.setattr(observed, "_Batch", make_and_collect)
    _, training = wrap(everything(1))
    sink = Kept()
    training.add_sink(sink)
    training(*data()[0])
    reader = training._observing._thread
    training.__dict__["cycle"] = training
    gc.disable()
    del training
    nobody_keeps_it.set()
    gc.enable()
    reader._thread.join(30)
    assert not reader.works and sink.closed == 1
    assert {r.step for r in sink.records} == set(range(D))


def test_a_failed_record_observes_nothing(tmp_path):
    poptorch.RunWriter(tmp_path / "there").close()
    model, options = Model(), options_of()
    training = poptorch.trainingModel(model, options, OPTIMIZERS["sgd"](model))
    with pytest.raises(poptorch.Error):
        training.record(tmp_path / "there")
    training.record(tmp_path / "new", "layers.2.weight", every=2)
    training(*data()[0])
    assert list(training.observing().requests) == ["layers.2.weight"]


def test_a_writer_among_the_sinks_records_one_program(tmp_path, caplog):
    _, training = wrap(lambda o: o.observe("layers.2.weight", every=1))
    training.add_sink(poptorch.RunWriter(tmp_path / "run"))
    training(*data()[0])
    training.destroy()
    training(*data()[0])
    training.close_sinks()
    assert poptorch.Run(tmp_path / "run").steps == list(range(D))
    assert caplog.text.count("is not recorded") == 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_while_sinks_read_the_records_of_each_other():
    first, second = (wrap(everything(1))[1] for _ in range(2))

    class Reads(Kept):
        def __init__(self, other):
            super().__init__()
            self.other = other

        def write_records(self, records):
            super().write_records(self.other.observations() or records)

    first.add_sink(Reads(second))
    second.add_sink(Reads(first))
    began = time.monotonic()
    for _ in range(20):
        first(*data()[0])
        second(*data()[0])
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    assert time.monotonic() - began < 30
    first.close_sinks()
    second.close_sinks()
