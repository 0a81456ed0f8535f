"""``cycleCount`` and ``logCycleCount``: the simulated cycles of a call."""

import logging
import re
import time

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options
from tests.unit.executor.nets import Function, Net, batch, infer, train


def counting(*counts):
    return make_options(*counts).logCycleCount(True)


def test_the_count_is_that_of_the_estimate():
    model = train(Net(), counting())
    model(*batch())
    count = model.cycleCount()
    assert type(count) is int
    assert count == round(model.estimate().cycles) > 0


def test_the_count_does_not_depend_on_values_or_on_the_host():
    counts = []
    for scale in (0.0, 1e3):
        model = infer(Net(), counting())
        model(scale * torch.ones(6, 4))
        time.sleep(0.01)
        model(scale * torch.ones(6, 4))
        counts.append(model.cycleCount())
    assert counts[0] == counts[1]


def test_the_count_grows_with_the_work():
    def count(iterations, size):
        model = infer(nn.Linear(512, 512), counting(iterations))
        model(torch.ones(size * iterations, 512))
        return model.cycleCount()

    assert count(1, 4) < count(2, 4) < count(4, 4)
    assert count(1, 4) < count(1, 1024)


def test_the_first_replica_is_counted():
    def count(replicas):
        model = infer(Net(), counting().replicationFactor(replicas))
        model(torch.ones(6 * replicas, 4))
        return model.cycleCount()

    assert count(2) == pytest.approx(count(1), rel=0.05)


def test_the_data_of_the_host_counts():
    def count(size):
        model = infer(Function(lambda x: x[:, :1]), counting())
        model(torch.ones(4, size))
        return model.cycleCount()

    # 8 GB/s at 1.33 GHz: about 6 bytes in a cycle.
    more = 4 * 4 * 1_000_000
    assert count(1_000_001) - count(1) > more / 12


def test_the_count_follows_the_machine():
    def count(version):
        model = infer(nn.Linear(2048, 2048), counting().machine(version))
        model(torch.ones(512, 2048))
        return model.cycleCount()

    assert count("ipu1") != count("ipu2")


def test_a_new_program_has_a_count_of_its_own():
    model = infer(nn.Linear(256, 256), counting())
    model(torch.ones(4, 256))
    small = model.cycleCount()
    model.destroy()
    with pytest.raises(poptorch.Error, match="run the model at least once"):
        model.cycleCount()
    model(torch.ones(4096, 256))
    assert model.cycleCount() > small


def test_every_call_logs_its_cycles_in_one_debug_line(caplog):
    model = infer(Net(), counting())
    x = batch()[0]
    with caplog.at_level(logging.DEBUG, logger="poptorch::python"):
        model.compile(x)
        assert not _lines(caplog)
        for number in (1, 2, 3):
            model(x)
            assert len(_lines(caplog)) == number
    assert all(record.levelno == logging.DEBUG for record in _lines(caplog))
    (count,) = {int(re.search(r"\d+", one.getMessage())[0]) for one in _lines(caplog)}
    assert count == model.cycleCount()


def _lines(caplog):
    return [record for record in caplog.records if "cycles" in record.getMessage()]


def test_nothing_is_logged_without_the_option(caplog):
    model = infer(Net())
    with caplog.at_level(logging.DEBUG, logger="poptorch::python"):
        model(batch()[0])
    assert not _lines(caplog)


def test_nothing_is_estimated_while_nobody_reads_the_line(monkeypatch):
    monkeypatch.setattr(
        "popsim_torch.executor.timing.compiled_estimate", lambda *_: pytest.fail("an estimate")
    )
    model = infer(Net(), counting())
    model(batch()[0])


def test_a_loaded_model_counts(tmp_path):
    model = train(Net(), counting())
    model(*batch())
    model.save(tmp_path / "model.poptorch")
    loaded = poptorch.load(tmp_path / "model.poptorch")
    loaded(*batch())
    assert loaded.cycleCount() == model.cycleCount()
