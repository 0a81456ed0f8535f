"""Arguments of optimizers: supported ones change an update, accepted ones change none."""

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch.optim.settings import read_optimizer
from tests.options import make_options
from tests.unit.surface_table import LISTED, Net, parts, paths

HALF = torch.float16
# A value of each argument that is not the default.
VALUES = {
    "lr": 0.25,
    "momentum": 0.25,
    "dampening": 0.5,
    "weight_decay": 0.125,
    "nesterov": True,
    "betas": (0.5, 0.75),
    "eps": 1e-3,
    "alpha": 0.5,
    "centered": True,
    "maximize": True,
    "foreach": True,
    "capturable": True,
    "differentiable": True,
    "fused": True,
    "amsgrad": True,
    "loss_scaling": 2.0,
    "velocity_scaling": 2.0,
    "use_combined_accum": True,
    "accum_type": HALF,
    "velocity_accum_type": HALF,
    "first_order_momentum_accum_type": HALF,
    "second_order_momentum_accum_type": HALF,
    "max_grad_norm": 0.5,
    "max_weight_norm": 0.5,
    "bias_correction": False,
    "use_tf_variant": True,
}


def listed(state):
    """Return the arguments in a state, as kind and name; ``params`` is in every test."""
    return [
        (parts(path).owner.removeprefix("optim."), parts(path).argument)
        for path in paths(state)
        if path.startswith("optim.") and parts(path).argument not in (None, "params")
    ]


def settings_of(kind, argument):
    """Return the values to compare, and the same with another value of the argument."""
    base = {"lr": 0.5}
    if kind == "SGD":
        base["momentum"] = 0.75
    if argument == "velocity_scaling":
        base["use_combined_accum"] = True
    other = base | {argument: VALUES[argument]}
    if argument == "fused":
        other["foreach"] = False
    return base, other


def described(kind, settings):
    """Return the settings that a model reads from an optimizer."""
    optimizer = getattr(poptorch.optim, kind)([torch.nn.Parameter(torch.ones(2))], **settings)
    read = read_optimizer(optimizer)
    return read.rule, read.loss_scaling, read.defaults, read.groups[0].values


def trained(kind, settings):
    """Return weights and state after two updates of two micro-batches."""
    torch.manual_seed(0)
    net = Net()
    optimizer = getattr(poptorch.optim, kind)(net.parameters(), **settings)
    model = poptorch.trainingModel(net, make_options(2, 2), optimizer)
    model(torch.randn(8, 4))
    model.copyWeightsToHost()
    return {"weight": net.weight.detach().clone(), **optimizer.state_dict()["ipu_state"]}


@pytest.mark.parametrize(("kind", "argument"), listed("supported"))
def test_an_argument_that_acts_reaches_the_update(kind, argument):
    base, other = settings_of(kind, argument)
    assert described(kind, base) != described(kind, other)


@pytest.mark.parametrize(("kind", "argument"), listed("accepted"))
def test_an_accepted_argument_changes_no_bit_and_no_type(kind, argument):
    base, other = settings_of(kind, argument)
    expected, found = trained(kind, base), trained(kind, other)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert (tensor.dtype, tensor.tolist()) == (found[name].dtype, found[name].tolist()), name


@pytest.mark.parametrize(("kind", "argument"), listed("refused"))
def test_a_refused_argument_is_an_error(kind, argument):
    _, other = settings_of(kind, argument)
    with pytest.raises(poptorch.Error, match="Only non-amsgrad"):
        described(kind, other)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop", "LAMB"])
def test_parameters_are_those_of_the_groups(kind):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = getattr(poptorch.optim, kind)([weight], lr=0.5)
    assert read_optimizer(optimizer).groups[0].parameters == (weight,)
    assert f"optim.{kind}(params)" in LISTED


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop", "LAMB"])
def test_every_attribute_of_an_object_is_listed(kind):
    optimizer = getattr(poptorch.optim, kind)([torch.nn.Parameter(torch.ones(2))], lr=0.5)
    own = {name.removeprefix("_") for name in vars(optimizer)} - {
        *("state", "zero_grad_profile_name", "warned_capturable_if_run_uncaptured"),
        *(name.removeprefix("_") for name in vars(optimizer) if name.startswith("_optimizer_")),
    }
    assert {f"optim.{kind}.{name}" for name in own} <= LISTED
