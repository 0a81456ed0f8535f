"""Channels of the trace, with a library that records into a list."""

import copy
import pickle
import sys
import types
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import popsim_torch as poptorch
from popsim_torch.dataloader import DataLoader
from popsim_torch.options import Options
from popsim_torch.profiling import Channel
from tests.options import make_options


@pytest.fixture
def trace(monkeypatch):
    """The trace of a program, as text."""
    lines = []

    @contextmanager
    def tracepoint(channel, label):
        lines.append(f"{channel} begins {label}")
        try:
            yield
        finally:
            lines.append(f"{channel} ends {label}")

    library = types.ModuleType("libpvti")
    library.createTraceChannel = lambda name: f"<{name}>"
    library.Tracepoint = tracepoint
    monkeypatch.setitem(sys.modules, "libpvti", library)
    monkeypatch.setenv("PVTI_OPTIONS", '{"enable": "true"}')
    return lines


class Counter:
    def __init__(self):
        self.count = 0

    def add(self, number, *, times=1):
        self.count += number * times
        return self.count

    def __getitem__(self, index):
        return index + self.count


def test_tracepoint_is_labelled_with_its_channel(trace):
    with Channel("data").tracepoint("load"):
        trace.append("loading")
    assert trace == ["<data> begins data.load", "loading", "<data> ends data.load"]


def test_instrumented_methods_are_traced(trace):
    counter = Counter()
    assert Channel("c").instrument(counter, "add", "missing") is counter
    assert counter.add(2, times=3) == 6
    assert trace == ["<c> begins c.add", "<c> ends c.add"]


def test_an_exception_ends_the_tracepoint(trace):
    counter = Channel("c").instrument(Counter(), "add")
    with pytest.raises(TypeError):
        counter.add("text")
    assert trace == ["<c> begins c.add", "<c> ends c.add"]


def test_special_methods_are_traced(trace):
    counter = Counter()
    assert Channel("c").instrument(counter, "__getitem__") is counter
    assert counter[3] == 3
    assert isinstance(counter, Counter)
    assert trace == ["<c> begins c.__getitem__", "<c> ends c.__getitem__"]


def test_other_objects_of_the_class_are_not_traced(trace):
    Channel("c").instrument(Counter(), "__getitem__")
    assert Counter()[3] == 3
    assert trace == []


@pytest.mark.parametrize("name", ["add", "__getitem__"])
def test_a_channel_shows_each_method_once(trace, name):
    counter = Counter()
    for _ in range(2):
        Channel("c").instrument(counter, name)
    counter.add(1)
    assert counter[1] == 2
    assert trace == [f"<c> begins c.{name}", f"<c> ends c.{name}"]


def test_objects_of_built_in_types_are_left_alone(trace):
    numbers = [1, 2]
    assert Channel("c").instrument(numbers, "__getitem__") is numbers
    assert numbers[1] == 2


def test_instrumented_objects_can_be_copied_and_pickled(trace):
    counter = Channel("c").instrument(Counter(), "__getitem__")
    counter.add(4)
    for other in (copy.copy(counter), pickle.loads(pickle.dumps(counter))):
        assert type(other) is Counter
        assert other.count == 4


def test_nothing_happens_without_the_variable(trace, monkeypatch):
    monkeypatch.delenv("PVTI_OPTIONS")
    counter = Counter()
    assert Channel("c").instrument(counter, "add", "__getitem__") is counter
    with Channel("c").tracepoint("x"):
        counter.add(1)
    assert trace == []
    assert vars(counter) == {"count": 1}
    assert type(counter) is Counter


def test_nothing_happens_without_the_library(monkeypatch):
    monkeypatch.setenv("PVTI_OPTIONS", "{}")
    monkeypatch.setitem(sys.modules, "libpvti", None)
    counter = Counter()
    assert Channel("c").instrument(counter, "add") is counter
    with Channel("c").tracepoint("x"):
        assert counter.add(1) == 1
    assert vars(counter) == {"count": 1}


def test_loaders_are_traced(trace):
    loader = DataLoader(Options(), TensorDataset(torch.arange(2)))
    assert [x.item() for (x,) in loader] == [0, 1]
    loader.terminate()
    begun = [line for line in trace if "begins" in line]
    assert begun == [
        "<poptorch.DataLoader> begins poptorch.DataLoader.__iter__",
        "<dataset> begins dataset.__getitem__",
        "<dataset> begins dataset.__getitem__",
        "<poptorch.DataLoader> begins poptorch.DataLoader.terminate",
    ]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return poptorch.identity_loss(self.fc(x).square(), "mean")


def shown(trace):
    """Return the events begun since the last call, each with its parent: ``a/b``."""
    paths, around = [], []
    for line in trace:
        channel, what, label = line.split(" ")
        name = label.removeprefix(f"{channel[1:-1]}.")
        if what == "ends":
            assert around.pop() == name
            continue
        around.append(name)
        paths.append("/".join(around))
    assert around == []
    trace.clear()
    return paths


def test_executors_are_traced(trace):
    net, x = Net(), torch.ones(2, 4)
    model = poptorch.trainingModel(net, make_options())
    model.compile(x)
    compilation = ["compile/modelCompilation", "compile/modelCompilation/graphPreprocessing"]
    assert shown(trace) == ["compile", *compilation]
    model(x)
    assert shown(trace) == ["modelExecution"]
    model.setOptimizer(poptorch.optim.SGD(net.parameters(), lr=0.01))
    model.copyWeightsToHost()
    model.copyWeightsToDevice()
    assert shown(trace) == ["setOptimizer", "copyWeightsToHost", "copyWeightsToDevice"]
    model.destroy()
    assert shown(trace) == ["destroy"]


def test_files_are_traced(trace, tmp_path):
    model = poptorch.inferenceModel(Net(), make_options())
    model.compileAndExport(tmp_path / "net.poptorch", torch.ones(2, 4))
    around = "compileAndExport"
    assert shown(trace) == [
        around,
        f"{around}/compile",
        f"{around}/compile/modelCompilation",
        f"{around}/compile/modelCompilation/graphPreprocessing",
        f"{around}/saveExecutableToFile",
    ]
    model.destroy()
    model.loadExecutable(tmp_path / "net.poptorch")
    assert shown(trace)[:3] == ["destroy", "loadExecutable", "loadExecutable/modelCompilation"]


@pytest.mark.parametrize(
    ("wrap", "channel"),
    [
        (poptorch.trainingModel, "poptorch.trainingModel"),
        (poptorch.inferenceModel, "poptorch.inferenceModel"),
    ],
)
def test_executors_have_a_channel_of_their_kind(trace, wrap, channel):
    wrap(Net(), make_options())(torch.ones(2, 4))
    assert {line.split(" ")[0] for line in trace} == {f"<{channel}>"}


def test_executors_that_are_not_traced_stay_as_they_are():
    model = poptorch.inferenceModel(Net(), make_options())
    assert not {"compile", "destroy", "copyWeightsToHost"} & set(vars(model))
