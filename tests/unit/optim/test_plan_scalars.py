"""The values of hyper-parameters as the device gets them."""

import pytest
import torch

from popsim_torch import optim
from popsim_torch.enums import ReductionType
from popsim_torch.optim.planning import plan_updates, read_optimizer
from tests.unit.optim.plans import plan, scalars, values


def test_plain_sgd_scalars(fc):
    optimizer = optim.SGD(
        fc.parameters(), lr=0.1, dampening=0.5, weight_decay=0.2, loss_scaling=8.0
    )
    made = plan(optimizer, fc, gradient_accumulation=4)
    assert values(made) == pytest.approx(
        {"scaledLearningRate0": 0.1 * 0.5 / (8 * 4), "weightDecayScaleFactor0": 1 - 0.1 * 0.5 * 0.2}
    )
    summed = plan(optimizer, fc, gradient_accumulation=2, reduction=ReductionType.Sum)
    assert values(summed)["scaledLearningRate0"] == pytest.approx(0.1 * 0.5 / 8)


def test_variable_scalars_of_sgd_with_a_learning_rate(fc):
    made = plan(optim.SGD(fc.parameters(), lr=0.1), fc)
    assert sorted(made.variable_scalars()) == [
        "scaledLearningRate0___specific___bias",
        "scaledLearningRate0___specific___weight",
        "weightDecayScaleFactor0___specific___bias",
        "weightDecayScaleFactor0___specific___weight",
    ]


def test_loss_scaling_is_a_scalar_when_given(fc):
    made = plan(optim.SGD(fc.parameters(), lr=0.1, loss_scaling=2.0), fc)
    assert made.variable_scalars()["lossScaling_FLOAT"].value == 2.0


def test_constant_ingredients_make_a_constant_scalar(fc):
    made = plan(optim.Adam(fc.parameters(), lr=0.1), fc)
    assert {prefix for prefix, (_, constant) in scalars(made).items() if not constant} == {
        "learningRate"
    }


def test_momentum_sgd_scalars(fc):
    optimizer = optim.SGD(
        fc.parameters(),
        lr=0.1,
        momentum=0.9,
        dampening=0.5,
        weight_decay=0.2,
        loss_scaling=8.0,
    )
    made = plan(optimizer, fc, gradient_accumulation=4)
    assert values(made) == pytest.approx(
        {
            "scaledLearningRate2": 0.1 / 8,
            "scaledWeightDecay1": 0.5 * 0.2 * 8,
            "dampeningScaleFactor2": 0.5 / 4,
            "scaledMomentum2": 0.9,
        }
    )


def test_nesterov_adds_scalars(fc):
    optimizer = optim.SGD(fc.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    assert set(values(plan(optimizer, fc))) >= {
        *("nesterovGradScaleFactor2", "nesterovDampeningScaleFactor2"),
        "sgdMomentum",
        "sgdWeightDecay",
    }


@pytest.mark.parametrize("name", ["Adam", "AdamW", "LAMB"])
def test_adam_scalars(fc, name):
    optimizer = getattr(optim, name)(
        fc.parameters(), lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2, loss_scaling=8.0
    )
    expected = {
        "learningRate": 0.1,
        "weightDecay": 0.2,
        "adamBeta1": 0.8,
        "adamBeta2": 0.9,
        "adamEps": 1e-6,
        "adamGradientScaling": 8.0 * 3,
    }
    if name == "LAMB":
        expected["maxWeightNorm"] = 65500.0
    assert values(plan(optimizer, fc, gradient_accumulation=3)) == expected


def test_rmsprop_scalars(fc):
    optimizer = optim.RMSprop(fc.parameters(), lr=0.1, alpha=0.8, momentum=0.7, loss_scaling=2.0)
    assert values(plan(optimizer, fc, gradient_accumulation=3)) == {
        "learningRate": 0.1,
        "weightDecay": 0.0,
        "adaptiveAlpha": 0.8,
        "adaptiveMomentum": 0.7,
        "adaptiveEps": 1e-8,
        "adaptiveGradientScaling": 6.0,
    }


def test_groups_have_their_own_values(fc):
    groups = [{"params": [fc.weight], "lr": 0.5}, {"params": [fc.bias]}]
    made = plan(optim.SGD(groups, lr=0.1), fc)
    assert values(made, "weight")["scaledLearningRate0"] == 0.5
    assert values(made, "bias")["scaledLearningRate0"] == 0.1
    assert made.groups == (("weight",), ("bias",))


def test_parameters_outside_of_all_groups_have_the_defaults():
    fc = torch.nn.Linear(3, 2)
    model = torch.nn.Sequential(fc, torch.nn.Linear(2, 2).half())
    optimizer = optim.SGD([{"params": [fc.weight, fc.bias], "lr": 0.5}], lr=0.1)
    made = plan(optimizer, model)
    names = [s.name for s in made.updates[3].scalars]
    assert names == [
        "weightDecayScaleFactor0___default___FLOAT16",
        "scaledLearningRate0___default___FLOAT",
    ]
    assert made.scalars()["scaledLearningRate0___default___FLOAT"].value == 0.1


def test_frozen_parameters_are_left_alone(fc):
    optimizer = optim.SGD(fc.parameters(), lr=0.1)
    made = plan_updates(
        optimizer, {"weight": fc.weight}, all_parameters=dict(fc.named_parameters())
    )
    assert [u.parameter for u in made.updates] == ["weight"]
    assert made.groups == (("weight", "bias"),)


def test_values_count_when_they_are_read(fc):
    optimizer = optim.SGD(fc.parameters(), lr=0.1)
    settings = read_optimizer(optimizer)
    optimizer.param_groups[0]["lr"] = 0.7
    assert values(plan(settings, fc))["scaledLearningRate0"] == 0.1
