"""Channels of the trace: with a library that records into a list, and without one."""

import copy
import json
import os
import pickle
import re
import subprocess
import sys
import types
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import popsim_torch as poptorch
from popsim_torch import host_trace
from popsim_torch.dataloader import DataLoader
from popsim_torch.options import Options
from popsim_torch.profiling import Channel
from tests.options import make_options
from tests.sweeps import sampled


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


# Without libpvti: our own trace.

_PROGRAM = """
import threading
import torch, popsim_torch as poptorch
from popsim_torch.profiling import Channel

channel = Channel("data")

def work():
    with channel.tracepoint("outer"), channel.tracepoint("inner"):
        pass

work()
thread = threading.Thread(target=work, name="worker")
thread.start()
thread.join()
poptorch.inferenceModel(torch.nn.Linear(4, 2))(torch.ones(1, 4))
"""


def _run_traced(folder, program=_PROGRAM, **variables):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_program_leaves_a_trace_of_its_channels(tmp_path):
    _run_traced(tmp_path, PVTI_OPTIONS='{"enable":"true","directory":"reports"}')
    (path,) = (tmp_path / "reports").iterdir()
    pattern = r"popsim_host__\d{4}-\d\d-\d\d__\d\d-\d\d-\d\d\.\d{3}__\d+\.trace\.json"
    assert re.fullmatch(pattern, path.name)
    trace = json.loads(path.read_text())
    names = [one for one in trace["traceEvents"] if one["ph"] == "M"]
    work = [one for one in trace["traceEvents"] if one["ph"] == "X"]
    assert [one["args"]["name"] for one in names] == ["host (measured)", "MainThread", "worker"]
    assert [one["ts"] for one in work] == sorted(one["ts"] for one in work)
    labels = [(one["cat"], one["name"], one["tid"]) for one in work]
    assert labels[:4] == [
        ("data", "data.outer", 1),
        ("data", "data.inner", 1),
        ("data", "data.outer", 2),
        ("data", "data.inner", 2),
    ]
    assert ("poptorch.inferenceModel", "poptorch.inferenceModel.modelExecution", 1) in labels
    outer, inner = work[:2]
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.002


def test_the_marks_of_channels_are_in_the_trace_of_a_report(tmp_path):
    _run_traced(
        tmp_path,
        PVTI_OPTIONS='{"enable":"true","directory":"marks"}',
        POPLAR_ENGINE_OPTIONS='{"autoReport.all":"true"}',
    )
    trace = json.loads((tmp_path / "inference" / "trace.json").read_text())
    measured = {one["name"] for one in trace["traceEvents"] if one["pid"] == 1000}
    assert {"call 0", "data.inner", "poptorch.inferenceModel.modelExecution"} <= measured


@pytest.mark.parametrize("options", sampled(['{"enable":"false","directory":"x"}', "{}", ""], [""]))
def test_no_trace_is_left_unless_it_is_turned_on(tmp_path, options):
    _run_traced(tmp_path, PVTI_OPTIONS=options)
    assert list(tmp_path.iterdir()) == []


def test_a_forked_process_leaves_the_trace_to_its_parent(tmp_path):
    program = f"import os\n{_PROGRAM}\nif os.fork() == 0:\n    raise SystemExit(0)\nos.wait()\n"
    _run_traced(tmp_path, program, PVTI_OPTIONS='{"enable":"true"}')
    assert len(list(tmp_path.iterdir())) == 1


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    options = '{"enable":"true","directory":"file"}'
    done = _run_traced(tmp_path, PVTI_OPTIONS=options)
    assert "PVTI_OPTIONS: the trace cannot be written" in done.stderr


def test_a_variable_that_is_no_object_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "libpvti", None)
    monkeypatch.setenv("PVTI_OPTIONS", "[1]")
    with pytest.raises(poptorch.Error, match="PVTI_OPTIONS is '\\[1\\]'"):
        Channel("c")


def test_marks_beyond_the_limit_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(host_trace, "_MOST_EVENTS", 2)
    trace = host_trace.HostTrace(tmp_path)
    for _ in range(5):
        with trace.Tracepoint(trace.createTraceChannel("c"), "c.x"):
            pass
    trace.write()
    content = json.loads(trace.path.read_text())
    assert content["otherData"]["left_out"] == "3 marks after the first 2"
    assert sum(one["ph"] == "X" for one in content["traceEvents"]) == 2
    trace.events.clear()
