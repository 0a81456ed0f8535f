"""The settings that are read from an optimizer, and which values are constant."""

import logging

import pytest
import torch

from popsim_torch import optim
from popsim_torch.errors import Error
from popsim_torch.optim.planning import read_optimizer
from tests.unit.optim.plans import LOGGER, combined_sgd, plan, values


def constants(optimizer):
    values = read_optimizer(optimizer).defaults
    return {name for name, value in values.items() if value.constant}


def test_constants_of_torch_sgd(fc):
    plain = torch.optim.SGD(fc.parameters(), lr=0.1)
    assert constants(plain) == {"momentum", "nesterov"}
    full = torch.optim.SGD(fc.parameters(), lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1)
    assert constants(full) == {"nesterov"}
    assert read_optimizer(plain).loss_scaling.constant


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_torch_adam_has_no_constants(fc, kind):
    assert constants(kind(fc.parameters())) == set()
    assert constants(kind(fc.parameters(), eps=1e-6, weight_decay=0.1)) == set()


def test_what_is_constant_can_be_taken_from_other_settings(fc):
    ours = read_optimizer(optim.Adam(fc.parameters(), lr=0.1, loss_scaling=2.0))
    torchs = read_optimizer(torch.optim.Adam(fc.parameters(), lr=0.3, eps=1e-6))
    for settings, other in ((torchs, ours), (ours, torchs)):
        found = settings.as_constant_as(other)
        assert found.loss_scaling.constant == other.loss_scaling.constant
        assert found.loss_scaling.value == settings.loss_scaling.value
        for new, own, others in (
            (found.defaults, settings.defaults, other.defaults),
            (found.groups[0].values, settings.groups[0].values, other.groups[0].values),
        ):
            assert {n: v.value for n, v in new.items()} == {n: v.value for n, v in own.items()}
            assert all(value.constant == others[n].constant for n, value in new.items())


def test_torch_constness_is_that_of_all_groups(fc):
    groups = [{"params": [fc.weight]}, {"params": [fc.bias], "momentum": 0.9}]
    assert "momentum" not in constants(torch.optim.SGD(groups, lr=0.1))


def test_automatic_loss_scaling_makes_the_loss_scaling_variable(fc):
    optimizer = torch.optim.SGD(fc.parameters(), lr=0.1)
    assert not read_optimizer(optimizer, automatic_loss_scaling=True).loss_scaling.constant


def test_unsupported_type(fc):
    with pytest.raises(AssertionError, match="Unsupported optimizer type LBFGS"):
        plan(torch.optim.LBFGS(fc.parameters()), fc)


def test_parameter_that_is_not_in_the_model(fc):
    optimizer = optim.SGD(torch.nn.Linear(5, 4).parameters(), lr=0.1)
    with pytest.raises(Error, match=r"shape \[4, 5\], is not in the model"):
        plan(optimizer, fc, all_parameters=dict(fc.named_parameters()))


def test_value_that_is_no_number(fc):
    optimizer = torch.optim.SGD(fc.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = torch.ones(2)
    with pytest.raises(AssertionError, match="Expected a number for lr"):
        plan(optimizer, fc)


def test_betas_that_are_no_pair(fc):
    optimizer = optim.Adam(fc.parameters(), lr=0.1)
    optimizer.param_groups[0]["betas"] = (0.1, 0.2, 0.3)
    with pytest.raises(AssertionError, match="Expected a pair of numbers for betas"):
        plan(optimizer, fc)


def test_centered_must_agree(fc):
    groups = [{"params": [fc.weight], "centered": True}, {"params": [fc.bias]}]
    with pytest.raises(AssertionError, match="same value of centered"):
        plan(optim.RMSprop(groups, lr=0.1), fc)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": -0.1}, "'lr' in group 0 is -0.1; it must not be negative"),
        ({"weight_decay": -0.1}, "'weight_decay' in group 0"),
        ({"momentum": -0.1}, "'momentum' in group 0"),
        ({"velocity_scaling": 0.0}, "'velocity_scaling' in group 0 is 0.0; it must be greater"),
    ],
)
def test_values_out_of_range(fc, change, message):
    optimizer = combined_sgd(fc)
    optimizer.param_groups[0].update(change)
    with pytest.raises(Error, match=message):
        plan(optimizer, fc)


def test_loss_scaling_of_zero(fc):
    with pytest.raises(Error, match="Loss scaling cannot be 0"):
        plan(optim.SGD(fc.parameters(), lr=0.1, loss_scaling=0.0), fc)


def test_learning_rate_of_zero(fc):
    optimizer = optim.SGD(fc.parameters(), lr=0.0)
    assert values(plan(optimizer, fc))["scaledLearningRate0"] == 0.0
    optimizer.variable_attrs.markAsConstant("lr")
    with pytest.raises(Error, match="constant learning rate"):
        plan(optimizer, fc)


def test_subclass_warns(fc, caplog):
    class MySgd(torch.optim.SGD):
        pass

    with caplog.at_level(logging.WARNING, LOGGER):
        read_optimizer(MySgd(fc.parameters(), lr=0.1))
    assert "MySgd is a subclass" in caplog.text


def test_loss_scaling_in_a_group_warns(fc, caplog):
    optimizer = optim.SGD([{"params": [fc.weight], "loss_scaling": 2.0}], lr=0.1)
    with caplog.at_level(logging.WARNING, LOGGER):
        settings = read_optimizer(optimizer)
    assert "loss_scaling in a parameter group is ignored" in caplog.text
    assert settings.loss_scaling.value == 1.0


def test_attributes_that_appear_later_warn_once(fc, caplog):
    optimizer = optim.SGD(fc.parameters(), lr=0.1)
    first = read_optimizer(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with caplog.at_level(logging.WARNING, LOGGER):
        second = read_optimizer(optimizer, known_attributes=first.attributes)
        read_optimizer(optimizer, known_attributes=second.attributes)
    assert [record.getMessage() for record in caplog.records] == [
        "Ignoring unexpected group 0 attribute in SGD2 optimizer: ['initial_lr']"
    ]


def test_unexpected_attributes_can_be_reported_as_debug(fc, caplog):
    optimizer = optim.SGD(fc.parameters(), lr=0.1)
    first = read_optimizer(optimizer)
    optimizer.colour = "red"
    with caplog.at_level(logging.DEBUG, LOGGER):
        read_optimizer(optimizer, known_attributes=first.attributes, relax_checks=True)
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert (
        record.getMessage()
        == "Ignoring unexpected optimizer attribute in SGD2 optimizer: ['colour']"
    )
