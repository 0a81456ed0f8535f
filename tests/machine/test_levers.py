"""``executor.levers``: the measured effect of device iterations, replicas and a queue."""

import logging
import random
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.executor.levers import Lever, LeverPoint, _elements, _FedRequest
from tests.options import make_options
from tests.unit.executor.nets import Net, batch, infer, train

QUICK = {"seconds": 0.005, "most_iterations": 4, "most_replicas": 2}


def values(lever):
    return [point.value for point in lever.points]


def state_of(model, optimizer):
    return [*map(torch.clone, model.state_dict().values()), repr(optimizer.state_dict())]


def same(one, other):
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


def test_all_levers_of_training_are_measured():
    found = train(Net(), make_options(2, 3)).levers(*batch(36), **QUICK)
    assert values(found.device_iterations) == [1, 2, 4]
    assert values(found.replicas) == [1, 2]
    assert values(found.inputs) == ["arguments", "a queue"]
    for lever in (found.device_iterations, found.replicas, found.inputs):
        assert max(point.share for point in lever.points) == 1
        assert all(point.seconds > 0 and point.rate > 0 for point in lever.points)
        assert not lever.left_out


def test_the_rate_counts_items_of_all_micro_batches_and_replicas():
    found = train(Net(), make_options(2, 3)).levers(*batch(36), **QUICK)
    for point in found.device_iterations.points:
        assert point.rate * point.seconds == pytest.approx(6 * 3 * point.value)
    for point in found.replicas.points:
        assert point.rate * point.seconds == pytest.approx(36 * point.value)


def test_the_present_settings_are_among_the_positions():
    found = infer(Net(), make_options(3)).levers(batch()[0], **QUICK)
    assert values(found.device_iterations) == [1, 2, 3, 4]


@pytest.mark.parametrize("runs", [0, 2])
def test_nothing_changes(runs):
    torch.manual_seed(1)
    net, (x, y) = Net(), batch()
    optimizer = poptorch.optim.Adam(net.parameters(), lr=0.1)
    model = train(net, make_options().randomSeed(3), optimizer)
    for _ in range(runs):
        model(x, y)
    before = state_of(net, optimizer)
    numbers = model.rng_state if runs else None
    random.seed(4), np.random.seed(4), torch.manual_seed(4)
    model.levers(x, y, **QUICK)
    drawn = [random.random(), np.random.rand(), torch.rand(1).item()]
    random.seed(4), np.random.seed(4), torch.manual_seed(4)
    assert drawn == [random.random(), np.random.rand(), torch.rand(1).item()]
    assert same(before, state_of(net, optimizer))
    assert model.isCompiled() == bool(runs)
    if runs:
        assert model.rng_state == numbers
    assert torch.isfinite(model(x, y)[1]).all()  # the executor still trains
    assert not same(before, state_of(net, optimizer))


def test_a_run_continues_as_if_nothing_had_been_measured():
    def weights(measures):
        torch.manual_seed(1)
        net, (x, y) = Net(), (torch.ones(6, 4), torch.zeros(6, dtype=torch.int64))
        model = train(net, make_options(), poptorch.optim.Adam(net.parameters(), lr=0.1))
        model(x, y)
        if measures:
            model.levers(x, y, **QUICK)
        model(x, y)
        return [*map(torch.clone, net.parameters())]

    assert same(weights(False), weights(True))


def test_a_program_that_a_queue_feeds_trains_as_one_that_calls_feed():
    results = []
    for fed in (False, True):
        torch.manual_seed(0)
        net, arguments = Net(), batch(24)
        model = train(net, make_options(2, 2))
        if fed:
            request = model._life.request(arguments, {})
            elements = _elements(request, arguments, {}, 4)
            assert [len(one[0]) for one in elements] == [6] * 4
            values = {one.name: getattr(request, one.name) for one in fields(request)}
            queue = poptorch.InfeedQueue(elements, repeat=True)
            model._life.take(model._device.compile(_FedRequest(**values, infeed=queue)))
        for _ in range(3):
            if fed:
                model._device.run([])
            else:
                model(*arguments)
        results.append([*map(torch.clone, net.parameters())])
        model.destroy()
    assert same(*results)


def test_the_knee_is_the_first_position_with_95_percent_of_the_best():
    shares = (0.5, 0.96, 1.0, 0.97)
    lever = Lever("x", tuple(LeverPoint(2**n, 1.0, 9.0, s) for n, s in enumerate(shares)))
    assert lever.knee.value == 2
    assert "x 2 gives 96% of the best." in str(lever)
    assert Lever("x", ()).knee is None


def test_it_prints_as_tables():
    found = infer(Net()).levers(batch()[0], **QUICK)
    text = str(found)
    assert text.startswith("Measured on this computer")
    for word in ("deviceIterations", "replicationFactor", "inputs from", "<- knee"):
        assert word in text
    assert "measured" in repr(found)


def test_positions_that_the_model_cannot_have_say_why():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.calls += 1
            return x + self.calls

    found = infer(Counting()).levers(torch.ones(2, 3), **QUICK)
    assert values(found.replicas) == [1]
    assert "buffer" in found.replicas.left_out[2]
    assert "not measured: " in str(found)


def test_long_calls_end_a_curve():
    model = infer(nn.Linear(1500, 1500))
    found = model.levers(torch.ones(800, 1500), **{**QUICK, "seconds": 1e-5})
    assert values(found.device_iterations) == [1]
    assert set(found.device_iterations.left_out) == {2, 4}


def test_keyword_arguments():
    found = infer(Net()).levers(x=batch()[0], **QUICK)
    assert values(found.inputs) == ["arguments", "a queue"]


def test_copies_write_no_reports_and_no_lines(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(
        "POPLAR_ENGINE_OPTIONS",
        f'{{"autoReport.all": "true", "autoReport.directory": "{tmp_path}"}}',
    )
    options = make_options().machine(tiles=1).logCycleCount(True)
    model = infer(nn.Linear(512, 512), options)
    with caplog.at_level(logging.DEBUG, logger="poptorch::python"):
        model.levers(torch.ones(2, 512), **QUICK)
    assert not list(tmp_path.iterdir())
    assert "cycles" not in caplog.text and "memory" not in caplog.text.lower()


def test_models_with_queues_are_refused():
    queue = poptorch.OutfeedQueue()

    class Enqueues(nn.Module):
        def forward(self, x):
            queue.enqueue(x)
            return x

    with pytest.raises(poptorch.Error, match="puts tensors into a queue"):
        infer(Enqueues()).levers(torch.ones(2, 3), **QUICK)
    assert not list(queue)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seconds": 0}, "seconds=0.*positive"),
        ({"seconds": "1"}, "pass a number"),
        ({"most_iterations": 0}, "most_iterations=0.*1 or more"),
        ({"most_replicas": 1.5}, r"most_replicas=1\.5.*int"),
    ],
)
def test_a_wrong_setting_is_an_error(settings, message):
    with pytest.raises(poptorch.Error, match=message):
        infer(Net()).levers(batch()[0], **settings)


def test_arguments_are_needed():
    with pytest.raises(poptorch.Error, match="levers: pass the arguments"):
        infer(Net()).levers()
