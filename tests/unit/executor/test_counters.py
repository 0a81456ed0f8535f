"""Timestamps of inputs and outputs, latencies, cycles, and the compilation time."""

import datetime
import time

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import OutputMode
from popsim_torch.executor.counters import RunShape, latency, perf_counters
from popsim_torch.ir import LoopCounts
from tests.unit.executor.nets import Function, Net, batch, infer, make_options, train

LATENCIES = ("getLatency", "getHostIpuLatency", "getComputeLatency", "getIpuHostLatency")
KEYS = ("input", "input_complete", "output", "output_complete")


def shape(d=1, ga=1, r=1, mode=OutputMode.All, period=1, inputs=1, outputs=1):
    return RunShape(LoopCounts(d, ga), r, mode, period, inputs, outputs)


def lengths(counters, key):
    return [len(stamps) for stamps in counters[key]]


# --- The stamps of a run ------------------------------------------------------------


def test_micro_batches_follow_each_other_evenly():
    counters = perf_counters(shape(d=4), (9.0, 10.0, 12.0))
    assert counters["input"] == [[9.75, 10.25, 10.75, 11.25]]
    assert counters["input_complete"] == [[10.0, 10.5, 11.0, 11.5]]
    assert counters["output"] == counters["output_complete"] == [[10.5, 11.0, 11.5, 12.0]]


@pytest.mark.parametrize(
    ("mode", "period", "written"),
    [
        (OutputMode.All, 1, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]),
        (OutputMode.Final, 1, [8.0]),
        (OutputMode.Sum, 1, [8.0]),
        (OutputMode.EveryN, 2, [3.0, 4.0, 7.0, 8.0]),
    ],
)
def test_outputs_are_stamped_as_their_mode_returns_them(mode, period, written):
    counters = perf_counters(shape(d=4, ga=2, mode=mode, period=period), (0.0, 0.0, 8.0))
    assert counters["output"] == [written]


def test_replicas_have_stamps_of_their_own():
    counters = perf_counters(shape(d=2, r=3, mode=OutputMode.Final), (-1.0, 0.0, 2.0))
    assert counters["input"] == [[-0.5, -0.5, -0.5, 0.5, 0.5, 0.5]]
    assert counters["output"] == [[2.0, 2.0, 2.0]]


def test_every_tensor_has_a_list():
    counters = perf_counters(shape(inputs=3, outputs=2), (0.0, 0.0, 1.0))
    assert [len(counters[key]) for key in KEYS] == [3, 3, 2, 2]
    assert counters["input"][0] is not counters["input"][1]


def test_a_run_that_moved_nothing_has_empty_lists():
    counters = perf_counters(shape(inputs=2), None)
    assert counters["input"] == [[], []]
    assert counters["output"] == [[]]


# --- Latencies --------------------------------------------------------------------------


def stamps(**lists):
    return {key: lists.get(key, [[]]) for key in KEYS}


def test_a_latency_goes_from_the_first_tensor_to_the_last_one():
    times = stamps(input=[[1.0, 5.0], [2.0, 4.0]], output_complete=[[3.0, 9.0], [7.0, 8.0]])
    assert latency(times, "input", "output_complete") == (5.0, 6.0, 5.5)


def test_what_is_complete_counts_with_its_last_tensor():
    times = stamps(input_complete=[[1.0], [2.0]], output=[[4.0], [3.0]])
    assert latency(times, "input_complete", "output") == (2.0, 2.0, 2.0)


def test_several_starts_for_one_end_are_grouped():
    times = stamps(input=[[3.0, 1.0, 5.0, 6.0]], output_complete=[[7.0, 10.0]])
    assert latency(times, "input", "output_complete") == (5.0, 6.0, 5.5)


def test_no_stamps_make_no_latency():
    assert latency(stamps(input=[[1.0]]), "input", "output_complete") == (0.0, 0.0, 0.0)
    assert latency(stamps(output_complete=[[1.0]]), "input", "output_complete") == (0.0, 0.0, 0.0)


def test_the_mean_lies_between_the_extremes_whatever_its_rounding():
    times = stamps(input=[[0.0] * 3], output_complete=[[0.1] * 3])
    assert latency(times, "input", "output_complete") == (0.1, 0.1, 0.1)


# --- Those of an executor -----------------------------------------------------------------


def test_before_compilation():
    model = infer(Net())
    assert model.getPerfCounters() == {key: [[]] for key in KEYS}
    assert [getattr(model, name)() for name in LATENCIES] == [(0.0, 0.0, 0.0)] * 4


def test_before_the_first_run():
    model = infer(Net())
    model.compile(*batch())
    counters = model.getPerfCounters()
    assert lengths(counters, "input") == [0, 0]
    assert lengths(counters, "output") == [0, 0]
    assert model.getLatency() == (0.0, 0.0, 0.0)


def test_of_inference():
    options = make_options(6).outputMode(OutputMode.EveryN, 3)
    model = infer(Function(lambda pair, y: {"a": pair[0] + y, "b": [pair[1]]}), options)
    x = torch.ones(12, 2)
    began = time.monotonic()
    model((x, x), x)
    ended = time.monotonic()
    counters = model.getPerfCounters()
    for key in KEYS[:2]:
        assert lengths(counters, key) == [6, 6, 6]
    for key in KEYS[2:]:
        assert lengths(counters, key) == [2, 2]
    for i in range(6):
        assert began <= counters["input"][0][i] < ended
    assert counters["output_complete"][0][1] <= ended
    assert all(
        first <= second
        for first, second in zip(counters["input"][0], counters["input"][0][1:], strict=False)
    )


def test_of_training():
    model = train(Net(), make_options(2, 3))
    x, y = batch(12)
    model(x, y)
    first = model.getPerfCounters()
    assert lengths(first, "input") == [6, 6]
    assert lengths(first, "output") == [1, 1]
    model(x, y)
    second = model.getPerfCounters()
    assert lengths(second, "input") == [6, 6]
    assert first["output_complete"][0][0] <= second["input"][0][0]


def test_latencies_fit_together():
    model = infer(Net(), make_options(3))
    model(batch(6)[0])
    whole, to, compute, back = (getattr(model, name)() for name in LATENCIES)
    for least, greatest, mean in (whole, to, compute, back):
        assert 0 <= least <= mean <= greatest
    assert whole[0] > 0 and to[0] > 0
    assert whole[2] == pytest.approx(to[2] + compute[2] + back[2])


def test_a_model_without_inputs_or_outputs():
    class Silent(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self):
            self.seen.add_(1)

    model = infer(Silent())
    assert model() is None
    assert model.getPerfCounters() == {key: [] for key in KEYS}
    assert model.getLatency() == (0.0, 0.0, 0.0)


def test_after_detaching_and_after_destroy():
    model = infer(Net())
    x, _ = batch()
    model(x)
    counters = model.getPerfCounters()
    model.detachFromDevice()
    assert model.getPerfCounters() == counters
    model.destroy()
    assert model.getPerfCounters() == {key: [[]] for key in KEYS}


# --- Cycles -----------------------------------------------------------------------------------


def test_cycles_are_asked_for_in_the_options_first():
    model = infer(Net())
    for _ in range(2):
        with pytest.raises(poptorch.Error, match="logCycleCount"):
            model.cycleCount()
        model(batch()[0])


def test_cycles_of_a_model_that_has_not_run():
    model = infer(Net(), make_options().logCycleCount(True))
    with pytest.raises(poptorch.Error, match="run the model at least once"):
        model.cycleCount()
    model.compile(batch()[0])
    with pytest.raises(poptorch.Error, match="run the model at least once"):
        model.cycleCount()


# --- Compilation ------------------------------------------------------------------------------


def test_the_time_of_compilation(capsys):
    options = make_options().showCompilationProgressBar(True)
    model = infer(Net(), options)
    with pytest.raises(poptorch.Error, match="compile the model"):
        model.compilationTime()
    model.compile(batch()[0])
    assert model.compilationTime() > datetime.timedelta(0)
    model.destroy()
    with pytest.raises(poptorch.Error, match="compile the model"):
        model.compilationTime()
    assert "Graph compilation" in capsys.readouterr().err


def test_the_time_of_compilation_needs_the_progress_bar():
    model = infer(Net())
    with pytest.raises(poptorch.Error, match="compile the model"):
        model.compilationTime()
    model.compile(batch()[0])
    with pytest.raises(poptorch.Error, match="showCompilationProgressBar"):
        model.compilationTime()
