"""Supported options and settings of the back end are read where models and loaders are made.

Other settings are only stored: a setting that is never read has no effect.
"""

import copy
from typing import ClassVar

import pytest
import torch
from torch.utils.data import TensorDataset

import popsim_torch as poptorch
from popsim_torch.options.back_end_keys import OVERRULED
from popsim_torch.options.base import OptionsGroup
from tests.options import make_options
from tests.unit.surface_table import Net, entries, parts, paths

SETTINGS = "Options._Popart.options"
X = torch.ones(4, 4)
# All enabled settings are passed to the trace together, which looks for these
# (test_options_back_end.py has their values).
LOOKED_FOR_IN_THE_TRACE = {"enableNonStableSoftmax", "groupNormStridedChannelGrouping"}


class Recording(dict):
    """Settings of the back end that record the keys that were read, in ``read``."""

    read: ClassVar[set[str]] = set()

    def get(self, key, default=None):
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)

    def __deepcopy__(self, memo):
        return Recording(copy.deepcopy(dict(self), memo))


@pytest.fixture
def read(monkeypatch, tmp_path):
    """Return the stored values and the back-end settings that are read during a program's life."""
    stored = set()
    original = OptionsGroup.__call__

    def recorded(group, option):
        stored.add(option)
        return original(group, option)

    monkeypatch.setattr(OptionsGroup, "__call__", recorded)
    monkeypatch.setattr(Recording, "read", set())

    options = make_options(2).randomSeed(1).useIpuId(0).modelName("m").useIpuModel(True)
    options.outputMode(poptorch.OutputMode.EveryN, 2).anchorTensor("w", "weight")
    options.enableProfiling(tmp_path).enableExecutableCaching(tmp_path).updatableNamedBuffers(
        ["offset"]
    )
    options.Training.setAutomaticLossScaling(True)
    options._Popart.__dict__["_options"] = Recording(options._Popart.options)
    stored.clear()  # values that setters have read
    list(poptorch.DataLoader(options, TensorDataset(X)))
    model = poptorch.trainingModel(Net(), options)
    model(X)
    model.setOptimizer(poptorch.optim.SGD(model.model.parameters(), lr=0.01))
    model.copyNamedBuffersToDevice()
    assert model.getLatency()[0] >= 0
    model.destroy()
    offline = options.clone().useOfflineIpuTarget()
    offline.deleteIfExists("ipu_id")
    poptorch.inferenceModel(Net(), offline).compile(X)
    replicated = make_options().replicationFactor(4).inputReplicaGrouping(2)
    poptorch.inferenceModel(Net(), replicated)(X)
    distributed = make_options().randomSeed(1)
    distributed.Distributed.configureProcessId(1, 2)
    shared = poptorch.DataLoader(distributed, TensorDataset(X))
    assert len(shared) == 2
    list(shared)
    return stored, Recording.read


def stored_values(state):
    """Return the keys of the stored values in a state: names in lower case."""
    listed = {parts(path).owner.rpartition(".")[2] for path in paths(state) if "_" in path}
    return {
        key
        for key in listed
        if any(key in group._settings() for group in (Options, *map(type, GROUPS)))
    }


Options = poptorch.Options
GROUPS = [
    getattr(poptorch.Options(), name) for name in ("Training", "Distributed", "TensorLocations")
]


def test_stored_values_that_act_are_read(read):
    supported = stored_values("supported") | stored_values("refused")
    assert {"device_iterations", "gradient_accumulation", "output_mode"} <= supported
    assert supported - read[0] == set()


def test_accepted_stored_values_are_not_read(read):
    accepted = stored_values("accepted")
    assert {"sync_pattern", "location_weight", "available_memory_proportion"} <= accepted
    # The report of the model has an estimate, which no value depends on.
    assert accepted & read[0] == {"available_memory_proportion", "ipu_version"}


def test_settings_of_the_back_end_that_act_are_read(read):
    supported = set(entries(SETTINGS, "supported"))
    assert supported - read[1] == LOOKED_FOR_IN_THE_TRACE


def test_accepted_settings_of_the_back_end_are_not_read(read):
    # The log says that the model overrides the first setting. The loss scale is logged or refused,
    # depending on the loss. For the last ones a warning says that another option decides.
    assert set(entries(SETTINGS, "accepted")) & read[1] == {
        "enablePipelining",
        "ensureFp32LossScaleTensor",
        *OVERRULED,
    }
