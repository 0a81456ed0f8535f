"""Anchors with a pattern: every tensor that it matches, with the values of single anchors."""

import logging
import re

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import OutputMode, tensors
from popsim_torch.executor import compile as compile_path
from tests.options import make_options
from tests.parity.anchors.common import (
    LEARNING_RATE,
    LOOPS,
    SGD_NAMES,
    make_batch,
    make_net,
    modes_of,
    short_name,
)

GRADIENTS = [f"Gradient___fc{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")]


def trained(options, batch=None, make=poptorch.optim.SGD, **settings):
    """Return an executor after a call."""
    net = make_net()
    model = poptorch.trainingModel(net, options, make(net.parameters(), LEARNING_RATE, **settings))
    model(*(batch or make_batch(options.device_iterations, accumulation_of(options))))
    return model


def accumulation_of(options):
    return options.Training.gradient_accumulation


def anchored(select, *mode, d=1, ga=1):
    return make_options(d, ga).anchorTensor("it", select, *mode)


@pytest.mark.parametrize(("d", "ga"), LOOPS)
def test_in_every_mode_it_gives_what_single_anchors_give(d, ga):
    options, patterns = make_options(d, ga), make_options(d, ga)
    for mode, period in modes_of(d):
        patterns.anchorTensor(f"{mode.name} {period}", "*", mode, period)
        for name in SGD_NAMES:
            options.anchorTensor(short_name(name, mode, period), name, mode, period)
    single, several = trained(options), trained(patterns)
    for mode, period in modes_of(d):
        found = several.getAnchoredTensor(f"{mode.name} {period}")
        axes = several.anchor_axes(f"{mode.name} {period}")
        assert sorted(found) == sorted(several.getTensorNames())
        assert axes.keys() == found.keys()
        for name in SGD_NAMES:
            one = short_name(name, mode, period)
            assert torch.equal(found[name], single.getAnchoredTensor(one)), one
            assert axes[name] == single.anchor_axes(one)


def test_anchors_change_no_name_and_no_weight():
    plain = trained(make_options())
    model = trained(anchored("*", OutputMode.All))
    assert model.getTensorNames() == plain.getTensorNames()
    known = {one.name: one for one in model.names()}
    before = [one for one in plain.names() if one.shape is not None]
    assert [known[one.name] for one in before] == before
    order = [one for one in known if one in {other.name for other in before}]
    assert order == [one.name for one in before]
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, model.model.state_dict()[name])


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        ("Gradient___*.weight", GRADIENTS[::2]),
        ("Gradient___model.*.weight", GRADIENTS[::2]),
        (poptorch.Glob("fc1.weight"), ["fc1.weight"]),
        (re.compile(r"^Gradient___fc\d\.\w+$"), GRADIENTS),
        (tensors.gradients() & tensors.of_module("fc2") & "*.bias", ["Gradient___fc2.bias"]),
        (tensors.weights(), ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]),
        (["fc1.bias", "Gradient___fc?.bias"], ["fc1.bias", *GRADIENTS[1::2]]),
        (lambda one: one.shape == (4, 5), ["fc1.weight", "Gradient___fc1.weight"]),
    ],
)
def test_what_a_selection_records(select, expected):
    model = trained(anchored(select))
    found = model.getAnchoredTensor("it")
    assert set(expected) <= set(found)
    if not callable(select):
        assert sorted(found) == sorted(expected)
    order = [one.name for one in model.names()]
    assert list(found) == sorted(found, key=order.index)


def test_a_name_with_brackets_is_a_name():
    class Buffers(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.register_buffer("x[0]", torch.full((2,), 3.0))
            self.register_buffer("x0", torch.full((2,), 4.0))

        def forward(self, x):
            return self.fc(x) + getattr(self, "x[0]") + self.x0

    options = make_options().anchorTensor("name", "x[0]")
    options.anchorTensor("pattern", poptorch.Glob("x[0]"))
    model = poptorch.inferenceModel(Buffers(), options)
    model(torch.zeros(1, 2))
    assert torch.equal(model.getAnchoredTensor("name"), torch.full((2,), 3.0))
    assert list(model.getAnchoredTensor("pattern")) == ["x0"]


def test_parts_of_the_update_are_computed_for_a_pattern():
    model = trained(anchored("AdamUpdater___*"), make=poptorch.optim.Adam)
    single = trained(anchored("AdamUpdater___fc1.weight"), make=poptorch.optim.Adam)
    found = model.getAnchoredTensor("it")
    assert sorted(found) == sorted(name.replace("Gradient", "AdamUpdater") for name in GRADIENTS)
    assert torch.equal(found["AdamUpdater___fc1.weight"], single.getAnchoredTensor("it"))


def test_a_function_is_not_asked_about_tensors_without_a_shape():
    asked = []
    model = trained(anchored(lambda one: asked.append(one)), make=poptorch.optim.Adam)
    assert model.getAnchoredTensor("it") == {}
    assert {one.name for one in asked} == {
        one.name for one in model.names() if one.shape is not None
    }
    assert all(one.shape is not None for one in asked)


def test_periods_longer_than_a_call():
    options = anchored("Gradient___*", OutputMode.EveryN, 3)
    model = trained(options)
    model(*make_batch(1, 1))
    with pytest.raises(AssertionError, match="'it' has no value yet"):
        model.getAnchoredTensor("it")
    model(*make_batch(1, 1))
    single = trained(anchored("Gradient___fc1.bias", OutputMode.EveryN, 3))
    for _ in range(2):
        single(*make_batch(1, 1))
    found = model.getAnchoredTensor("it")["Gradient___fc1.bias"]
    assert torch.equal(found, single.getAnchoredTensor("it"))


def test_replicas():
    def run(select):
        options = anchored(select, OutputMode.All, d=2)
        options.replicationFactor(2).autoRoundNumIPUs(True)
        return trained(options, make_batch(4, 1))

    model, single = run("Gradient___*.weight"), run("Gradient___fc1.weight")
    found = model.getAnchoredTensor("it")
    assert list(found) == GRADIENTS[2::-2]
    assert torch.equal(found["Gradient___fc1.weight"], single.getAnchoredTensor("it"))
    axes = model.anchor_axes("it")["Gradient___fc1.weight"]
    assert axes.sizes == (2, 1, 2, 4, 5)


class Halves(nn.Module):
    """Two stages."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        with poptorch.Block("a", ipu_id=0):
            x = torch.tanh(self.a(x))
        with poptorch.Block("b", ipu_id=1):
            return poptorch.identity_loss(self.b(x).square(), "mean")


def test_copies_of_a_pipeline():
    def run(select):
        torch.manual_seed(3)
        net, options = Halves(), anchored(select, OutputMode.All, ga=4)
        model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), 0.1))
        model(torch.randn(8, 4))
        return model

    found = run("Stashed___*").getAnchoredTensor("it")
    assert found
    for name, value in found.items():
        assert torch.equal(value, run(name).getAnchoredTensor("it"))


class Loop(nn.Module):
    """Adds up squares in a loop of five iterations."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        (x,) = poptorch.for_loop(5, lambda x: [torch.tanh(self.fc(x))], [x])
        return x


def test_tensors_in_the_body_of_a_loop():
    def run(select):
        model = poptorch.inferenceModel(Loop(), anchored(select))
        model(torch.linspace(-1, 1, 6).reshape(2, 3))
        return model

    model = run("*Tanh*")
    ((name, value),) = model.getAnchoredTensor("it").items()
    assert torch.equal(value, run(name).getAnchoredTensor("it"))
    assert ("iteration", 5) in model.anchor_axes("it")[name]


@pytest.mark.parametrize("count", [None, 0])
def test_a_body_without_a_fixed_number_of_iterations_is_told(caplog, count):
    class Net(nn.Module):
        def forward(self, x):
            if count is None:
                start = torch.zeros((), dtype=torch.int32)
                body = lambda i, y: (i + 1, torch.sin(y))  # noqa: E731
                return torch.while_loop(lambda i, y: i < 3, body, (start, x))[1]
            return poptorch.for_loop(count, lambda y: [torch.sin(y)], [x])[0]

    model = poptorch.inferenceModel(Net(), anchored(["Sin*", "input"]))
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        model(torch.ones(2, 3))
    (text,) = [one.getMessage() for one in caplog.records if "anchorTensor" in one.getMessage()]
    assert "'Sin:0' cannot be recorded: the body of a loop that makes no" in text
    assert list(model.getAnchoredTensor("it")) == ["input"]


# fit, loops, files


def fitted(select):
    net = make_net()
    batches = [make_batch(1, 1, seed) for seed in range(4)]
    options = anchored(select, OutputMode.All)
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE)
    model = poptorch.trainingModel(net, options, optimizer)
    seen = []

    class Callback:
        def on_epoch_end(self, epoch, logs, anchors):
            seen.append(anchors["it"])

    history = poptorch.fit(model, batches, epochs=2, callbacks=Callback(), verbose=0)
    return model, history, seen


@pytest.mark.parametrize("select", ["Gradient___fc?.weight", "fc?/Gemm:0", "model/fc?/Gemm:0"])
def test_fit_records_patterns(select):
    model, history, seen = fitted(select)
    found = model.getAnchoredTensor("it")
    assert len(found) == 2
    for name, value in found.items():
        assert torch.equal(value, fitted(name)[0].getAnchoredTensor("it"))
        assert torch.equal(value, history.anchors["it"][name])
        assert torch.equal(value, seen[-1][name])
        assert model.anchor_axes("it")[name].sizes[:3] == (4, 1, 1)
    assert len(seen) == 2
    next(iter(found.values())).zero_()
    assert not torch.equal(next(iter(found.values())), next(iter(history.anchors["it"].values())))


def test_a_function_with_loops_records_patterns():
    net = Loop()
    options = anchored("*Gemm*", OutputMode.All)

    @poptorch.function(options=options)
    def run(x):
        return poptorch.repeat(3, lambda y: torch.tanh(net.fc(y)), x)

    run(torch.ones(2, 3))
    (program,) = run.programs
    ((name, value),) = program.getAnchoredTensor("it").items()
    assert program.anchor_axes("it")[name].sizes == (3, 1, 1, 2, 3)
    assert value.shape == (6, 3)
    assert [one.name for one in program.names("*Gemm*")] == [name]


SELECTIONS = {
    "glob": "Gradient___*",
    "glob object": poptorch.Glob("Gradient___*"),
    "regex": re.compile("^Gradient___"),
    "combined": tensors.gradients() & ~tensors.of_dtype(torch.float16) & ~tensors.of_stage(3),
    "module": tensors.of_module("fc*") & tensors.gradients(),
    "list": [tensors.Glob("Gradient___*.weight"), "Gradient___fc1.bias"],
}


@pytest.mark.parametrize("kind", SELECTIONS)
def test_a_file_has_the_pattern_and_its_tensors(tmp_path, kind):
    model = trained(anchored(SELECTIONS[kind]))
    expected = model.getAnchoredTensor("it")
    model.save(tmp_path / "model.poptorch")
    loaded = poptorch.load(tmp_path / "model.poptorch")
    assert loaded.options.anchored_tensors == model.options.anchored_tensors
    batch = make_batch(1, 1, 9)
    model(*batch)
    loaded(*batch)
    found = loaded.getAnchoredTensor("it")
    assert found.keys() == expected.keys()
    for name, value in model.getAnchoredTensor("it").items():
        assert torch.equal(found[name], value)
    assert loaded.anchor_axes("it") == model.anchor_axes("it")
    assert loaded.names() == model.names()


def test_a_function_in_a_file_is_refused(tmp_path):
    model = trained(anchored(lambda one: one.kind == "weight"))
    with pytest.raises(poptorch.Error, match=r"anchorTensor\('it', \.\.\.\) selects .* a function"):
        model.save(tmp_path / "model.poptorch")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def made(monkeypatch):
    """Count the programs that are compiled instead of found in the cache."""
    calls = []
    real = compile_path._state_program

    def count(*args):
        calls.append(args)
        return real(*args)

    monkeypatch.setattr(compile_path, "_state_program", count)
    return calls


def test_the_cache_tells_patterns_apart(tmp_path, made):
    selections = [*SELECTIONS.values(), "Gradient___?*", re.compile("^gradient___", re.IGNORECASE)]
    for number in range(2):
        for select in selections:
            found = trained(anchored(select).enableExecutableCaching(tmp_path))
            assert "Gradient___fc1.bias" in found.getAnchoredTensor("it")
        assert len(made) == len(selections), number


def test_a_cached_program_warns_like_a_new_one(tmp_path, made, caplog):
    for number in range(1, 3):
        with caplog.at_level(logging.WARNING, "poptorch::python"):
            model = trained(anchored("fc3*").enableExecutableCaching(tmp_path))
        assert model.getAnchoredTensor("it") == {}
        texts = [one.getMessage() for one in caplog.records]
        assert sum("'fc3*' matches none" in text for text in texts) == number
    assert len(made) == 1


def test_a_function_is_not_cached(tmp_path, made):
    for _ in range(2):
        trained(anchored(lambda one: True).enableExecutableCaching(tmp_path))
    assert len(made) == 2


def test_a_clone_of_options_keeps_patterns():
    for select in SELECTIONS.values():
        options = anchored(select)
        assert options.clone().anchored_tensors == options.anchored_tensors
