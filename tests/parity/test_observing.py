"""Observing changes no bit, and its statistics are those of the tensors that anchors return."""

import copy
import gc
import math
import os
import threading
import time

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import PipelineSchedule
from popsim_torch.executor import observed
from popsim_torch.statistics import (
    Channels,
    Counts,
    Fingerprint,
    Histogram,
    Moments,
    Sample,
    TopK,
    merge,
    statistics_of,
)
from tests.options import make_options
from tests.sweeps import one_by_one

D, GA, BATCH, CALLS = 4, 3, 2, 2
EVERYTHING = (
    *(Moments(), Counts(), Histogram(2), TopK(3), Sample(5), Fingerprint()),
    Channels(-1),
)
EXACT = (Counts(), Histogram(2), TopK(3), Sample(5), Fingerprint())
OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "combined": lambda m: poptorch.optim.SGD(
        m.parameters(), lr=0.05, momentum=0.9, use_combined_accum=True
    ),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "lamb": lambda m: poptorch.optim.LAMB(m.parameters(), lr=0.01),
}


class Model(nn.Module):
    """Layers with a table, running statistics, random numbers and products that updates ride on."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Embedding(10, 6),
            nn.BatchNorm1d(6),
            nn.Linear(6, 8),
            nn.ReLU(),
            nn.Dropout(0.25),
            nn.Linear(8, 8),
            nn.GELU(),
            nn.Linear(8, 3),
        )
        self.to(dtype)

    def forward(self, x, y):
        out = self.layers(x)
        return out, nn.functional.cross_entropy(out.float(), y)


def options_of(replicas=1, accumulation=GA, training=True):
    options = make_options(
        D if training else D * accumulation, accumulation if training else 1, seed=3
    )
    options.outputMode(poptorch.OutputMode.All).autoRoundNumIPUs(True)
    return options.replicationFactor(replicas)


def data(replicas=1, calls=CALLS, accumulation=GA):
    torch.manual_seed(1)
    rows = BATCH * D * accumulation * replicas
    return [(torch.randint(0, 10, (rows,)), torch.randint(0, 3, (rows,))) for _ in range(calls)]


def wrap(
    observe,
    *,
    optimizer="momentum",
    stages=1,
    schedule=None,
    dtype=torch.float32,
    replicas=1,
    accumulation=GA,
):
    model, options = Model(dtype), options_of(replicas, accumulation)
    if schedule is not None:
        options.pipelineSchedule(schedule)
    if stages > 1:
        poptorch.set_pipeline_stage_assignment(model.layers, [i * stages // 8 for i in range(8)])
    observe(options)
    return model, poptorch.trainingModel(model, options, OPTIMIZERS[optimizer](model))


def results(observe, replicas=1, accumulation=GA, **settings):
    """Train; return outputs, weights and records."""
    model, training = wrap(observe, replicas=replicas, accumulation=accumulation, **settings)
    rows = data(replicas, accumulation=accumulation)
    found = [tensor for x, y in rows for tensor in training(x, y)]
    records = training.observations() if training.options._observations else []
    found += [value.clone() for value in model.state_dict().values()]
    training.destroy()
    return found, records


def nothing(options):
    pass


def everything(every):
    return lambda options: options.observe("*", *EVERYTHING, every=every)


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("optimizer", "every"), one_by_one(OPTIMIZERS, [2, 1, 3, 7, None]))
def test_no_bit_changes(optimizer, every):
    expected, _ = results(nothing, optimizer=optimizer)
    found, records = results(everything(every), optimizer=optimizer)
    same(found, expected)
    steps = sorted({record.step for record in records})
    if every is not None:
        assert steps == list(range(0, D * CALLS, every))
    else:
        assert steps and all(step < D * CALLS for step in steps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("threads_used", [1, 2])
def test_types_and_threads(dtype, threads_used, threads):
    threads(threads_used)
    expected, _ = results(nothing, dtype=dtype)
    found, records = results(everything(2), dtype=dtype)
    same(found, expected)
    assert len(records) > 100


@pytest.fixture(scope="module")
def prints_of_one_stage():
    """The fingerprints of a model that has no stages."""
    return _fingerprints(results(everything(2), accumulation=8)[1])


SCHEDULES = [s for s in PipelineSchedule if s != PipelineSchedule.Default]


@pytest.mark.parametrize(("stages", "schedule"), one_by_one([4, 2], SCHEDULES))
def test_stages_on_threads(stages, schedule, threads, prints_of_one_stage):
    settings = {"accumulation": 8, "stages": stages, "schedule": schedule}
    expected, _ = results(nothing, **settings)
    for number in (1, 2):
        threads(number)
        found, records = results(everything(2), **settings)
        same(found, expected)
        prints = {
            place: print_
            for place, print_ in _fingerprints(records).items()
            if place[0].startswith(("Gradient___layers", "UpdatedVar___layers"))
        }
        assert prints and prints.items() <= prints_of_one_stage.items()


def _fingerprints(records):
    return {(r.name, r.step, r.micro_batch): r.statistics.fingerprint for r in records}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("number", [1, 2])
def test_replicas(number, optimizer, threads):
    threads(number)
    expected, _ = results(nothing, replicas=2, optimizer=optimizer)
    found, records = results(everything(2), replicas=2, optimizer=optimizer)
    same(found, expected)
    name = "Gradient___layers.2.weight"
    by_replica = [
        [r.statistics.fingerprint for r in records if r.name == name and r.replica == replica]
        for replica in range(2)
    ]
    assert len(by_replica[0]) == len(by_replica[1]) == D // 2 * CALLS * GA
    assert by_replica[0] != by_replica[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_statistics_are_those_of_anchored_tensors(dtype):
    _, records = results(everything(1), dtype=dtype)
    names = sorted({record.name for record in records})
    found = {(r.name, r.step, r.micro_batch): r.statistics for r in records}
    _, training = wrap(
        lambda options: [
            options.anchorTensor(name, name, output_mode=poptorch.OutputMode.All) for name in names
        ],
        dtype=dtype,
    )
    num_compared = 0
    for call, (x, y) in enumerate(data()):
        training(x, y)
        for name in names:
            if name.startswith(("Accum", "UpdatedVar___Accum", "scaled")):
                continue  # (anchored, they are those after the update, or have the weight's dtype)
            value = training.getAnchoredTensor(name)
            axes = training.anchor_axes(name)
            entries = value.reshape(D, GA, -1) if len(axes.sizes) else value
            for iteration in range(D):
                for micro_batch in range(GA):
                    step = call * D + iteration
                    one = found.get((name, step, micro_batch))
                    if one is None:
                        one = found[name, step, None]
                    entry = entries[iteration, micro_batch]
                    if entry.dtype == torch.int32 and one.count != entry.numel():
                        continue
                    expected = statistics_of(entry, Moments(), *EXACT)
                    for field in ("count", "nans", "infs", "zeros", "half_overflows"):
                        assert getattr(one, field) == getattr(expected, field), (name, field)
                    for field in ("mean", "std", "minimum", "maximum", "norm", "absolute_mean"):
                        assert getattr(one, field) == pytest.approx(
                            getattr(expected, field), rel=1e-9, abs=1e-12, nan_ok=True
                        ), (name, field)
                    if entry.dtype.is_floating_point and entry.dtype == dtype:
                        assert one.fingerprint == expected.fingerprint, name
                        assert torch.equal(one.samples, expected.samples)
                        assert torch.equal(one.top_values, expected.top_values)
                        assert torch.equal(one.histogram.positive, expected.histogram.positive)
                    num_compared += 1
    assert num_compared > 1000


def test_a_weight_is_observed_once_per_update_with_the_value_that_micro_batches_used():
    model, training = wrap(lambda o: o.observe("layers.2.weight", Fingerprint(), every=1))
    before = statistics_of(model.layers[2].weight, Fingerprint()).fingerprint
    training(*data()[0])
    records = training.observations()
    assert [(r.step, r.micro_batch) for r in records] == [(i, None) for i in range(D)]
    assert records[0].statistics.fingerprint == before
    assert len({r.statistics.fingerprint for r in records}) == D


def test_over_iterations():
    _, apart = results(
        lambda o: o.observe("layers/3/Relu:0", Moments(), Counts(), Histogram(), every=2)
    )
    _, together = results(
        lambda o: o.observe(
            "layers/3/Relu:0", Moments(), Counts(), Histogram(), every=2, over="iteration"
        )
    )
    assert [(r.step, r.micro_batch) for r in together] == [(s, None) for s in range(0, 8, 2)]
    for record in together:
        parts = [r.statistics for r in apart if r.step == record.step]
        assert len(parts) == GA
        expected = merge(parts)
        assert record.statistics.mean == expected.mean
        assert record.statistics.zeros == sum(part.zeros for part in parts)
        assert torch.equal(record.statistics.histogram.positive, expected.histogram.positive)


def test_inference():
    def run(observe):
        model, options = Model().eval(), options_of(training=False)
        observe(options)
        inference = poptorch.inferenceModel(model, options)
        outputs = [tensor for x, y in data(calls=5) for tensor in inference(x, y)]
        return outputs, inference.observations() if options._observations else []

    expected, _ = run(nothing)
    found, records = run(everything(2))
    same(found, expected)
    steps = sorted({record.step for record in records})
    assert steps == [call * D * GA + i for call in (0, 2, 4) for i in range(D * GA)]


def test_two_calls_of_observe_unite():
    options = poptorch.Options()
    options.observe("Gradient___*", TopK(2), every=2)
    options.observe("Gradient___layers.2.*", TopK(4), Moments(), every=2)
    with pytest.raises(poptorch.Error, match="every"):
        options.observe("Relu*", every=3)
    model = Model()
    options.deviceIterations(D).Training.gradientAccumulation(GA)
    options.outputMode(poptorch.OutputMode.All)
    training = poptorch.trainingModel(model, options, OPTIMIZERS["sgd"](model))
    training(*data()[0])
    shown = training.observing()
    assert set(shown.requests["Gradient___layers.2.weight"]) == {TopK(4), Moments()}
    assert shown.requests["Gradient___layers.5.weight"] == (TopK(2),)
    assert shown.every == 2
    assert "Gradient___layers.5.weight" in str(shown)


def test_the_budget_chooses_the_distance():
    model, options = Model(), options_of()
    options.observe("*", *EVERYTHING, budget=0.05)
    training = poptorch.trainingModel(model, options, OPTIMIZERS["sgd"](model))
    x, y = data()[0]
    training(x, y)
    assert training.observing().every is None
    for _ in range(20):
        training(x, y)
    assert training.observing().every >= 2
    assert training.observations()


class _Kept:
    def __init__(self):
        self.records, self.closed, self.threads = [], 0, set()

    def write_records(self, records):
        self.records += records
        self.threads.add(threading.current_thread().name)

    def close(self):
        self.closed += 1


def test_sinks_get_every_record_while_the_model_runs():
    _, training = wrap(everything(1))
    sink = _Kept()
    training.add_sink(sink)
    x, y = data()[0]
    training(x, y)
    deadline = time.monotonic() + 20
    while not sink.records and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sink.threads == {"popsim_torch records"}
    training(x, y)
    training.close_sinks()
    assert sink.closed == 1
    records = training.observations()
    assert [(r.name, r.step, r.micro_batch) for r in records] == [
        (r.name, r.step, r.micro_batch) for r in sink.records
    ]
    assert {r.step for r in sink.records} == set(range(2 * D))


def test_a_failing_sink_stops_nothing(caplog):
    class Failing(_Kept):
        def write_records(self, records):
            raise OSError("no space left")

    _, training = wrap(everything(1))
    other = _Kept()
    training.add_sink(Failing())
    training.add_sink(other)
    for x, y in data():
        training(x, y)
    training.close_sinks()
    assert caplog.text.count("no space left") == 1
    assert len({r.step for r in other.records}) == D * CALLS


def test_destroy_passes_on_what_is_left():
    _, training = wrap(everything(1))
    sink = _Kept()
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


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"every": 0}, "at least 1"),
        ({"every": 1.5}, "number of device iterations"),
        ({"budget": 0}, "above 0"),
        ({"budget": math.inf}, "above 0"),
        ({"budget": "2%"}, "share"),
        ({"over": "epoch"}, "'micro_batch' or 'iteration'"),
    ],
)
def test_wrong_arguments(arguments, error):
    with pytest.raises(poptorch.Error, match=error):
        poptorch.Options().observe("*", **arguments)


def test_mistakes(caplog):
    options = poptorch.Options()
    with pytest.raises(poptorch.Error, match=r"Moments\(\)"):
        options.observe("*", Moments)
    with pytest.raises(poptorch.Error, match="a int selects"):
        options.observe(3)
    options.observe("Gradient___layer.*")
    model = Model()
    training = poptorch.trainingModel(model, options, OPTIMIZERS["sgd"](model))
    with pytest.raises(poptorch.Error, match=r"options.clone\(\)"):
        training.options.observe("*") or options.observe("*")
        options.observe("*")
    training(*(part[:BATCH] for part in data()[0]))
    assert "Gradient___layer.*" in caplog.text and "Gradient___layers" in caplog.text
    assert training.observations() == []
    with pytest.raises(poptorch.Error, match="compiled already"):
        training.record("anywhere")
    misspelt = poptorch.inferenceModel(Model(), poptorch.Options().observe("layers.2.wieght"))
    with pytest.raises(poptorch.Error, match=r"layers\.2\.weight"):
        misspelt(*(part[:BATCH] for part in data()[0]))
    plain = poptorch.inferenceModel(Model())
    for call in (plain.observations, lambda: plain.add_sink(_Kept())):
        with pytest.raises(poptorch.Error, match="observe nothing"):
            call()
    with pytest.raises(poptorch.Error, match="write_records"):
        training.add_sink(print)


def test_floating_point_checks_and_observing_do_not_go_together(caplog):
    model, options = Model(), options_of()
    options._Popart.set("enableFloatingPointChecks", True)
    options.observe("*", every=1)
    training = poptorch.trainingModel(model, options, OPTIMIZERS["sgd"](model))
    training(*data()[0])
    assert caplog.text.count("enableFloatingPointChecks") == 1
    assert training.observations() == []


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


class _Looped(nn.Module):
    """Calls a layer several times, in a loop of the device."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        (y,) = poptorch.for_loop(3, self.fc, [x])
        return poptorch.identity_loss(y.square(), "mean")


def test_tensors_inside_of_loops_are_not_observed(caplog):
    options = poptorch.Options()
    options.observe("fc/Gemm:0", every=1)
    options.observe("Gradient___fc.weight", every=1)
    training = poptorch.trainingModel(_Looped(), options)
    training(torch.ones(2, 3))
    assert {record.name for record in training.observations()} == {"Gradient___fc.weight"}
    assert caplog.text.count("fc/Gemm:0' cannot be observed") == 1
    assert "Options.anchorTensor" in caplog.text


def test_steps_count_from_0_since_the_model_was_compiled():
    _, training = wrap(lambda o: o.observe("Gradient___*", every=3))
    for _ in range(2):
        for x, y in data():
            training(x, y)
        assert sorted({one.step for one in training.observations()}) == [0, 3, 6]
        training.destroy()


def test_an_executor_that_nobody_keeps_passes_on_what_is_left():
    _, training = wrap(everything(1))
    sink = _Kept()
    training.add_sink(sink)
    training(*data()[0])
    del training
    gc.collect()
    assert sink.closed == 1
    assert {r.step for r in sink.records} == set(range(D))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_has_no_sinks_and_does_not_hang():
    _, training = wrap(everything(1))
    sink = _Kept()
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
    sink = _Kept()
    training.add_sink(sink)
    training(*data()[0])
    reader = training._observing._thread
    training.__dict__["cycle"] = training
    gc.disable()
    del training
    nobody_keeps_it.set()
    gc.enable()
    reader.join(30)
    assert not reader.is_alive() and sink.closed == 1
    assert {r.step for r in sink.records} == set(range(D))
