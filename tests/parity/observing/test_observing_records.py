"""The records of a run are those of the tensors that anchors return."""

import math
import threading

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.executor import kept_records
from popsim_torch.statistics import (
    Counts,
    Fingerprint,
    Histogram,
    Moments,
    TopK,
    merge,
    statistics_of,
)
from tests.parity.observing.models import (
    BATCH,
    CALLS,
    EVERYTHING,
    EXACT,
    GA,
    OPTIMIZERS,
    D,
    Kept,
    Model,
    data,
    everything,
    nothing,
    options_of,
    results,
    same,
    wrap,
)


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


def test_steps_count_from_0_since_the_model_was_compiled():
    _, training = wrap(lambda o: o.observe("Gradient___*", every=3))
    for _ in range(2):
        for x, y in data():
            training(x, y)
        assert sorted({one.step for one in training.observations()}) == [0, 3, 6]
        training.destroy()


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
    for call in (plain.observations, lambda: plain.add_sink(Kept())):
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


def test_records_come_in_the_order_of_the_run_while_it_runs():
    model, options = Model(), options_of(accumulation=2)
    options.deviceIterations(20_000).outputMode(poptorch.OutputMode.Final)
    names = ["layers/2/Gemm:0", "Gradient___layers.2.weight", "UpdatedVar___layers.2.weight"]
    options.observe(names, Counts(), every=1)
    training = poptorch.trainingModel(model, options, OPTIMIZERS["sgd"](model))
    rows = BATCH * 2 * 20_000
    x, y = torch.randint(0, 10, (rows,)), torch.randint(0, 3, (rows,))
    found, over = [], threading.Event()

    def read():
        while not over.is_set():
            found.append(training.observations())

    reader = threading.Thread(target=read)
    training(x, y)
    first = training.observations()
    reader.start()
    training(x, y)
    over.set()
    reader.join()
    found.append(training.observations())
    assert len([part for part in found if part]) > 2
    order = {(r.name, r.micro_batch): i for i, r in enumerate(r for r in first if r.step == 0)}
    places = [(r.step, order[r.name, r.micro_batch]) for part in found for r in part]
    assert places == sorted(places)
    assert len(places) == len(first)


def test_records_have_the_number_of_their_program():
    _, training = wrap(lambda o: o.observe("layers.2.weight", every=1))
    for number in range(2):
        training(*data()[0])
        assert {r.program for r in training.observations()} == {number}
        training.destroy()


def test_what_sinks_get_is_not_lost(monkeypatch):
    monkeypatch.setattr(kept_records, "_FEW", 1)
    monkeypatch.setattr(kept_records, "_MOST", 1)
    for has_sink in (True, False):
        _, training = wrap(everything(1))
        sink = Kept()
        if has_sink:
            training.add_sink(sink)
        for x, y in data():
            training(x, y)
            training._observing.work()
        assert (training.observing().dropped == 0) == has_sink
        assert len({r.step for r in training.observations()}) < D * CALLS
        training.destroy()
        assert len({r.step for r in sink.records}) == (D * CALLS if has_sink else 0)


def test_an_anchor_that_keeps_a_tensor_in_place_changes_no_record():
    def of_gradient(options):
        options.observe("Gradient___weight", Moments(), every=1)
        options.anchorTensor("gradient", "Gradient___weight")

    model = nn.Linear(3, 2)
    model.forward = lambda x: poptorch.identity_loss(nn.functional.linear(x, model.weight), "sum")
    options = poptorch.Options().showCompilationProgressBar(False)
    of_gradient(options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, options, optimizer)
    training(torch.ones(4, 3))
    (record,) = training.observations()
    assert (record.statistics.mean, training.getAnchoredTensor("gradient").mean()) == (4, 4)
