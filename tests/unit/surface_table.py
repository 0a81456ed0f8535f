"""The table of public names, and the objects that have these names."""

import importlib.util
import operator
import re
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.data import TensorDataset

import popsim_torch as poptorch
from tests.options import make_options

DOCS = Path(__file__).parents[2] / "docs"
_PARTS = re.compile(r'(?P<owner>[^(\[]*?)(\((?P<argument>\w+)\)|\["(?P<entry>.*)"\])?')


def read_table():
    """Return the module that reads the table of names."""
    spec = importlib.util.spec_from_file_location("docs_surface", DOCS / "surface.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLE = read_table()
NAMES = [name for _, names in TABLE.groups() for name in names]
LISTED = {name.path for name in NAMES}


class Parts(NamedTuple):
    """The parts of a path: the object, and optionally its argument or entry."""

    owner: str
    argument: str | None
    entry: str | None


def parts(path):
    """Return the parts of a path."""
    found = _PARTS.fullmatch(path)
    return Parts(found["owner"], found["argument"], found["entry"])


def paths(state):
    """Return the listed paths of a state."""
    return [name.path for name in NAMES if name.state == state]


def entries(owner, *states):
    """Return the listed entries of a mapping, of some states or of all."""
    return [
        parts(name.path).entry
        for name in NAMES
        if name.state in (states or TABLE.STATES)
        and parts(name.path).owner == owner
        and parts(name.path).entry is not None
    ]


class Net(nn.Module):
    """A layer with a buffer, and its loss."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))
        self.register_buffer("offset", torch.ones(3))

    def forward(self, x):
        return poptorch.identity_loss((x @ self.weight + self.offset).square(), "mean")


def _options():
    """Return options after calls of all setters that add a stored value."""
    options = make_options().randomSeed(1).useIpuModel(True).useIpuId(1)
    options.useOfflineIpuTarget().modelName("m").outputMode(poptorch.OutputMode.All)
    options.setExecutionStrategy(poptorch.SerialPhasedExecution("a"))
    options.showCompilationProgressBar(True)
    here = poptorch.TensorLocationSettings().useOnChipStorage()
    options.TensorLocations.numIOTiles(32).setActivationLocation(here).setWeightLocation(here)
    options.TensorLocations.setOptimizerLocation(here).setAccumulatorLocation(here)
    return options


def _executor():
    model = poptorch.trainingModel(Net(), make_options())
    model(torch.ones(2, 4))
    return model


def _optimizer(kind, **settings):
    return lambda: getattr(poptorch.optim, kind)([nn.Parameter(torch.ones(2))], lr=0.1, **settings)


# For classes that do not show all attributes of their objects: how to make an object.
OBJECTS = {
    "Options": _options,
    "PoplarExecutor": _executor,
    "DataLoader": lambda: poptorch.DataLoader(poptorch.Options(), TensorDataset(torch.ones(2))),
    "Error": lambda: poptorch.createPoptorchError("text"),
    "RecoverableError": lambda: poptorch.RecoverableError("text", "FULL_RESET"),
    "optim.SGD": _optimizer("SGD", use_combined_accum=True),
    **{f"optim.{kind}": _optimizer(kind) for kind in ("Adam", "AdamW", "RMSprop", "LAMB")},
}


def find(owner):
    """Return the object that a path without argument and entry names.

    Raises:
        AttributeError: The object does not exist.
    """
    held = [path for path in OBJECTS if owner.startswith(f"{path}.")]
    if not held:
        return operator.attrgetter(owner)(poptorch)
    return operator.attrgetter(owner.removeprefix(f"{held[0]}."))(OBJECTS[held[0]]())
