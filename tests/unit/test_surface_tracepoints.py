"""Every listed tracepoint shows in the trace, and no other does."""

import sys
import types
from contextlib import nullcontext

import torch
from torch.utils.data import TensorDataset

import popsim_torch as poptorch
from tests.options import make_options
from tests.unit.surface_table import Net, entries


def test_tracepoints_are_those_of_the_table(monkeypatch, tmp_path):
    labels = set()
    library = types.ModuleType("libpvti")
    library.createTraceChannel = str
    library.Tracepoint = lambda _channel, label: nullcontext(labels.add(label))
    monkeypatch.setitem(sys.modules, "libpvti", library)
    monkeypatch.setenv("PVTI_OPTIONS", '{"enable": "true"}')

    x, file = torch.ones(2, 4), tmp_path / "net.poptorch"
    loader = poptorch.DataLoader(poptorch.Options(), TensorDataset(x))
    assert len(list(loader)) == 2
    loader.terminate()
    for wrap in (poptorch.trainingModel, poptorch.inferenceModel):
        net = Net()
        model = wrap(net, make_options())
        model.compileAndExport(file, x)
        model(x)
        model.copyWeightsToHost()
        model.copyWeightsToDevice()
        if wrap is poptorch.trainingModel:
            model.setOptimizer(poptorch.optim.SGD(net.parameters(), lr=0.01))
        model.destroy()
        model.loadExecutable(file)

    assert labels == set(entries("profiling.Channel.tracepoint"))
