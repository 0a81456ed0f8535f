"""Properties of modules that make a function record again."""

import pytest
import torch
from torch import nn

from popsim_torch.loops.module_kinds import ModuleKinds


def make():
    model = nn.Sequential(
        nn.Linear(1, 1), nn.BatchNorm1d(1), nn.Linear(1, 1, bias=False), nn.ReLU()
    )
    return model, ModuleKinds(list(model.modules()))


def replaced(model):
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())  # a new one with equal values


def moved(model):
    # The same parameters in the same order, but one is in another module.
    model[2].register_parameter("first", model[1].bias)
    model[1].bias = None


def other_dictionary(model):
    model[0]._parameters = dict(model[0]._parameters, weight=nn.Parameter(torch.ones(1, 1)))


def equal_dictionary(model):
    model[0]._parameters = dict(model[0]._parameters)  # later parameters go into this dictionary


CHANGES = [
    lambda model: model.eval(),
    lambda model: model[1].eval(),
    lambda model: model[0].weight.requires_grad_(False),
    lambda model: setattr(model[0], "bias", None),
    lambda model: model.append(nn.ReLU()),
    lambda model: setattr(model, "0", nn.Linear(1, 1)),
    lambda model: model.__delitem__(1),
    replaced,
    moved,
    other_dictionary,
    equal_dictionary,
    # These changes bypass the methods of modules, or add a new attribute.
    lambda model: vars(model[0]).update(training=False),
    lambda model: model[0]._parameters.update(weight=nn.Parameter(torch.ones(1, 1))),
    lambda model: model[0].add_module("inner", nn.ReLU()),
    lambda model: model[2].register_parameter("second", nn.Parameter(torch.ones(1))),
    lambda model: model[3].register_parameter("first", nn.Parameter(torch.ones(1))),
    lambda model: model[3].register_parameter("first", None),
]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change):
    model, kinds = make()
    assert kinds.unchanged()
    change(model)
    assert not kinds.unchanged()


def test_what_makes_no_difference():
    model, kinds = make()
    with torch.no_grad():
        model[0].weight.mul_(2)
    model.train()
    model.eval().train()
    model[0].weight.requires_grad_(False).requires_grad_(True)
    assert kinds.unchanged()


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_modules_of_torchscript_are_let_be():
    kinds = ModuleKinds([torch.jit.script(nn.Linear(1, 1)), nn.ReLU()])
    assert kinds.unchanged()
