"""Values of optimizers that a loop's program can update, and those that it cannot."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.loops.optimizer_values import OptimizerValues


def weight(value=1.0):
    return nn.Parameter(torch.full((1,), value))


def make():
    torchs = torch.optim.SGD([{"params": [weight()]}, {"params": [weight()], "lr": 0.2}], lr=0.1)
    ours = poptorch.optim.Adam([weight()], lr=0.1, loss_scaling=2.0)
    return [torchs, ours]


def set_group(number, group, **values):
    return lambda optimizers: optimizers[number].param_groups[group].update(values)


def load(optimizers):
    state = optimizers[0].state_dict()
    state["param_groups"][1]["lr"] = 0.3
    optimizers[0].load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [
        set_group(0, 0, lr=0.3),
        set_group(0, 1, weight_decay=0.1),
        set_group(1, 0, betas=(0.8, 0.9)),
        lambda optimizers: setattr(optimizers[1], "loss_scaling", 4.0),
        lambda optimizers: setattr(optimizers[0], "loss_scaling", 4.0),
        load,
    ],
)
def test_other_values_are_seen_and_taken_over(change):
    optimizers = make()
    values = OptimizerValues(optimizers)
    assert not values.changed()
    change(optimizers)
    assert values.changed()
    assert values.fits()
    values.note()
    assert not values.changed()


@pytest.mark.parametrize(
    "change",
    [
        lambda optimizers: optimizers[1].add_param_group({"params": [weight()]}),
        lambda optimizers: optimizers[0].param_groups[0]["params"].append(weight()),
        lambda optimizers: optimizers[0].param_groups[0]["params"].clear(),
        set_group(0, 1, params=[weight(2.0)]),
        set_group(0, 0, momentum=0.9),
        set_group(0, 0, nesterov=True),
    ],
)
def test_what_needs_another_program_is_seen(change):
    optimizers = make()
    values = OptimizerValues(optimizers)
    change(optimizers)
    assert values.changed()
    assert not values.fits()
