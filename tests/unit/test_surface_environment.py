"""Environment variables: supported ones are read and take effect, others are checked."""

import ast
import os
import re
from pathlib import Path

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch import _native, environment, logs
from tests.options import make_options
from tests.unit.surface_table import Net, entries

PACKAGE = Path(poptorch.__file__).parent
VARIABLE = re.compile(
    r"(POPTORCH|POPLAR|POPART|POPSIM|PVTI|OMPI_COMM|PMI|SLURM)_[A-Z_]*[A-Z]|RANK|WORLD_SIZE"
)


class Recording(dict):
    """An environment that records which variables were read."""

    def __init__(self, environment):
        super().__init__(environment)
        self.read = set()

    def get(self, name, default=None):
        self.read.add(name)
        return super().get(name, default)

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)


@pytest.fixture
def recording(monkeypatch):
    for name in [name for name in os.environ if VARIABLE.fullmatch(name)]:
        monkeypatch.delenv(name)
    recorded = Recording(os.environ)
    monkeypatch.setattr(os, "environ", recorded)
    return recorded


def use_everything():
    """Use everything that the supported variables affect."""
    logs.obey_environment()
    _native._obey_environment()
    poptorch.ipuHardwareIsAvailable()
    poptorch.ipuHardwareVersion()
    options = make_options().useIpuId(0)
    model = poptorch.trainingModel(Net(), options)
    model.compile(torch.ones(2, 4))
    with pytest.raises(poptorch.Error, match="Failed to acquire"):
        poptorch.inferenceModel(Net(), options).compile(torch.ones(2, 4))


def variables(state):
    return set(entries("os.environ", state))


def test_variables_that_act_are_read_where_they_count(recording):
    use_everything()
    assert variables("supported") - recording.read == set()


def test_accepted_variables_are_checked_and_not_used(recording):
    use_everything()
    assert variables("accepted") & recording.read == set()
    environment.check()
    assert variables("accepted") - recording.read == set()


@pytest.mark.parametrize("variable", sorted(variables("accepted")))
def test_an_accepted_variable_may_not_hold_anything(variable, monkeypatch):
    monkeypatch.setenv(variable, "no such value")
    with pytest.raises(poptorch.Error, match=variable):
        environment.check()


def test_every_variable_of_the_package_is_listed():
    found = {
        node.value
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if VARIABLE.fullmatch(node.value)
    }
    assert found == set(entries("os.environ"))
