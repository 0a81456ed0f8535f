"""Each family of tensor names has members; one that is refused has none that can be anchored."""

import re

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import optim
from popsim_torch.enums import MeanReductionStrategy
from tests.options import make_options
from tests.unit.surface_table import entries

LISTS = "PoplarExecutor.getTensorNames"
# Values for the parts of a name that the table leaves open.
OPEN = {
    "<w>": r"(fc|out)\.(weight|bias)",
    "<buffer>": r"norm\.running_(mean|var)",
    "<t>": r".+",
    "<scope>": r"(fc|norm|out)",
    "<OpType>": r"[A-Z][A-Za-z]+",
    "<NameScope>": r"named",
    "<scalar>": r"[A-Za-z0-9]+",
    **dict.fromkeys(["<k>", "<n>", "<ipu>", "<opid>", "<idx>"], r"\d+"),
}
LR = {"lr": 0.5, "loss_scaling": 2.0, "weight_decay": 0.25}
MOMENTUM = LR | {"momentum": 0.5}
COMBINED = MOMENTUM | {"use_combined_accum": True, "velocity_scaling": 2.0}
ADAM = LR | {"betas": (0.5, 0.75), "eps": 1e-3}
RMSPROP = MOMENTUM | {"alpha": 0.5, "eps": 1e-3, "centered": True}
OPTIMIZERS = {
    "SGD": (optim.SGD, LR | {"dampening": 0.25}),
    "momentum": (optim.SGD, MOMENTUM | {"dampening": 0.25, "max_grad_norm": 1.0}),
    "Nesterov": (optim.SGD, MOMENTUM | {"nesterov": True}),
    "combined": (optim.SGD, COMBINED | {"dampening": 0.25}),
    "combined Nesterov": (optim.SGD, COMBINED | {"nesterov": True}),
    "Adam": (optim.Adam, ADAM),
    "LAMB": (optim.LAMB, ADAM | {"max_weight_norm": 1.0}),
    "RMSprop": (optim.RMSprop, RMSPROP),
}
PIPELINED = poptorch.PipelinedExecution(poptorch.AutoStage.SameAsIpu)
SHARDED = poptorch.ShardedExecution(poptorch.AutoStage.SameAsIpu)


class Net(nn.Module):
    """Two layers, on two IPUs if requested."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.out = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x, y):
        with poptorch.Block("first", ipu_id=0):
            x = self.norm(self.fc(x).tanh().tanh())
            with poptorch.NameScope("named"):
                x = torch.sigmoid(x + x.cos() * x.sin()).sigmoid()
        with poptorch.Block("second", ipu_id=1):
            return poptorch.identity_loss((self.out(x) - y).square(), "mean")


def names_of(kind, settings, *, strategy=SHARDED, options=None, dtype=torch.float32, given=None):
    net = Net().to(dtype)
    options = options or make_options(1, 4)
    options.setExecutionStrategy(strategy)
    parameters = net.parameters() if given is None else given(net)
    model = poptorch.trainingModel(net, options, kind(parameters, **settings))
    rows = 8 * options.replication_factor
    model.compile(torch.randn(rows, 4, dtype=dtype), torch.randn(rows, 3, dtype=dtype))
    return set(model.getTensorNames())


def running():
    options = make_options(1, 4)
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(
        MeanReductionStrategy.Running
    )
    return options


@pytest.fixture(scope="module")
def found():
    """Return the names of several programs that together have all families."""
    sgd = OPTIMIZERS["SGD"]
    listed = set().union(*(names_of(*optimizer) for optimizer in OPTIMIZERS.values()))
    listed |= names_of(*sgd, strategy=PIPELINED, options=running())
    listed |= names_of(*sgd, options=running())
    listed |= names_of(*sgd, dtype=torch.float16)
    listed |= names_of(*sgd, given=lambda net: [net.fc.weight])
    listed |= names_of(*sgd, options=make_options(1, 4).replicationFactor(2))
    scaled = make_options(1, 4)
    scaled.Training.setAutomaticLossScaling(True)
    return listed | names_of(*sgd, options=scaled)


def pattern(family):
    """Return the pattern of the names of a family; a lone scalar is one per parameter."""
    text = re.escape(family)
    for open_part, names_there in OPEN.items():
        text = text.replace(re.escape(open_part), names_there)
    scalar = r"___(specific___.+|default___FLOAT)" if re.fullmatch(r"[a-z]\w+", family) else "-"
    return re.compile(rf"{text}({scalar})?")


@pytest.mark.parametrize("family", entries(LISTS, "supported"))
def test_a_family_of_names_has_members(found, family):
    assert any(map(pattern(family).fullmatch, found))


@pytest.mark.parametrize("family", entries(LISTS, "refused"))
def test_a_refused_family_has_none_and_cannot_be_anchored(found, family):
    assert not any(map(pattern(family).fullmatch, found))
    name = family.replace("<w>", "fc.weight").replace("<t>", "input").replace("<n>", "1")
    options = make_options(1, 4)
    options.anchorTensor("it", name)
    with pytest.raises(poptorch.Error, match=f"named '{re.escape(name)}' .*Anchor tensor not in"):
        names_of(*OPTIMIZERS["SGD"], options=options)


def test_every_scalar_of_an_update_is_listed(found):
    scalars = {re.split("___(?:specific|default)___", name)[0] for name in found if "___" in name}
    scalars = {name for name in scalars if re.fullmatch(r"[a-z][A-Za-z]+\d?", name)}
    assert scalars <= set(entries(LISTS, "supported"))
