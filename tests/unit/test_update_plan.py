"""What becomes of an optimizer: its values, and the plan of the weight update."""

import logging

import pytest
import torch

from popsim_torch import optim
from popsim_torch.enums import ReductionType
from popsim_torch.errors import Error
from popsim_torch.optim.planning import GradientInput, plan_updates, read_optimizer

LOGGER = "poptorch::python"


@pytest.fixture
def fc() -> torch.nn.Linear:
    return torch.nn.Linear(3, 2)


def plan(optimizer, model, **options):
    parameters = dict(model.named_parameters())
    return plan_updates(optimizer, parameters, **options)


def scalars(made_plan, parameter="weight"):
    """Return prefix -> (value, constant) of one parameter's scalars."""
    (update,) = [u for u in made_plan.updates if u.parameter == parameter]
    return {s.name.split("___")[0]: (s.value, s.constant) for s in update.all_scalars}


def values(made_plan, parameter="weight"):
    return {prefix: value for prefix, (value, _) in scalars(made_plan, parameter).items()}


# --- What is constant -----------------------------------------------------------


def constants(optimizer):
    values = read_optimizer(optimizer).defaults
    return {name for name, value in values.items() if value.constant}


def test_constants_of_torch_sgd(fc):
    plain = torch.optim.SGD(fc.parameters(), lr=0.1)
    assert constants(plain) == {"momentum", "dampening", "weight_decay", "nesterov"}
    full = torch.optim.SGD(fc.parameters(), lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1)
    assert constants(full) == {"nesterov"}
    assert read_optimizer(plain).loss_scaling.constant


def test_constants_of_torch_adam(fc):
    assert constants(torch.optim.Adam(fc.parameters())) == {
        "beta1",
        "beta2",
        "eps",
        "weight_decay",
    }
    assert constants(torch.optim.Adam(fc.parameters(), eps=1e-6, weight_decay=0.1)) == {
        "beta1",
        "beta2",
    }
    assert "weight_decay" in constants(torch.optim.AdamW(fc.parameters()))
    assert "weight_decay" not in constants(torch.optim.AdamW(fc.parameters(), weight_decay=0.0))


def test_torch_constness_is_that_of_all_groups(fc):
    groups = [{"params": [fc.weight]}, {"params": [fc.bias], "momentum": 0.9}]
    assert "momentum" not in constants(torch.optim.SGD(groups, lr=0.1))


def test_automatic_loss_scaling_makes_the_loss_scaling_variable(fc):
    optimizer = torch.optim.SGD(fc.parameters(), lr=0.1)
    assert not read_optimizer(optimizer, automatic_loss_scaling=True).loss_scaling.constant


# --- Plans: structure ---------------------------------------------------------


def test_plain_sgd_without_accumulation_keeps_no_state(fc):
    made = plan(optim.SGD(fc.parameters(), lr=0.1), fc)
    assert made.type_name == "SGD2"
    assert [u.kind for u in made.updates] == ["sgd_update"] * 2
    assert made.states() == {}
    assert made.updates[0].gradient is GradientInput.GRADIENT
    assert made.updates[0].updated_name == "UpdatedVar___weight"


def test_variable_zero_momentum_keeps_a_velocity(fc):
    made = plan(optim.SGD(fc.parameters(), lr=0.1, momentum=0.0), fc)
    assert sorted(made.states()) == ["Accl___bias", "Accl___weight"]


def test_accumulator(fc):
    optimizer = optim.SGD(fc.parameters(), lr=0.1, momentum=0.9, accum_type=torch.float16)
    made = plan(optimizer, fc, gradient_accumulation=4)
    update = made.updates[0]
    (accumulation,) = update.accumulations
    assert accumulation.kind == "accumulate"
    assert accumulation.state.name == "Accum___weight"
    assert accumulation.state.dtype == torch.float16
    assert accumulation.output == "UpdatedVar___Accum___weight"
    assert accumulation.attributes == {"running": False}
    assert update.gradient is GradientInput.ACCUMULATOR
    assert [s.name for s in update.all_states] == ["Accum___weight", "Accl___weight"]
    assert sorted(made.saved_states()) == ["Accl___bias", "Accl___weight"]


def test_running_mean_is_not_divided_again(fc):
    optimizer = optim.SGD(fc.parameters(), lr=0.1)
    made = plan(optimizer, fc, gradient_accumulation=4, running_mean=True)
    assert made.updates[0].accumulations[0].attributes == {"running": True}
    assert values(made)["scaledLearningRate0"] == 0.1
    summed = plan(
        optimizer, fc, gradient_accumulation=4, running_mean=True, reduction=ReductionType.Sum
    )
    assert summed.updates[0].accumulations[0].attributes == {"running": False}


def test_half_accumulators_force_the_running_mean(fc):
    half = {"lr": 0.1, "accum_type": torch.float16}
    assert read_optimizer(optim.SGD(fc.parameters(), **half)).forces_running_mean
    combined = optim.SGD(fc.parameters(), use_combined_accum=True, **half)
    assert not read_optimizer(combined).forces_running_mean


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (lambda p: optim.Adam(p), ["Accl1", "Accl2", "Step"]),
        (lambda p: optim.AdamW(p, bias_correction=False), ["Accl1", "Accl2"]),
        (lambda p: optim.LAMB(p), ["Accl1", "Accl2", "Step"]),
        (lambda p: optim.RMSprop(p), ["Accl1"]),
        (lambda p: optim.RMSprop(p, centered=True), ["Accl1", "Accl3"]),
        (lambda p: optim.RMSprop(p, momentum=0.0, centered=True), ["Accl1", "Accl2", "Accl3"]),
        (lambda p: torch.optim.RMSprop(p), ["Accl1"]),
    ],
)
def test_states(fc, make, states):
    made = plan(make(fc.parameters()), fc)
    assert [s.kind for s in made.updates[0].states] == states


def test_state_dtypes():
    fc = torch.nn.Linear(3, 2).half()
    adam = optim.Adam(fc.parameters(), first_order_momentum_accum_type=torch.float16)
    assert [s.dtype for s in plan(adam, fc).updates[0].states] == [
        torch.float16,
        torch.float32,
        torch.float32,
    ]
    rmsprop = optim.RMSprop(
        fc.parameters(),
        lr=0.1,
        momentum=0.9,
        centered=True,
        first_order_momentum_accum_type=torch.float16,
    )
    assert [s.dtype for s in plan(rmsprop, fc).updates[0].states] == [
        torch.float16,
        torch.float32,
        torch.float16,
    ]
    combined = optim.SGD(fc.parameters(), lr=0.1, momentum=0.9, use_combined_accum=True)
    assert [s.dtype for s in plan(combined, fc).updates[0].states] == [torch.float16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_state_of_a_weight_that_the_device_holds_as_float(fc, dtype):
    combined = optim.SGD(fc.to(dtype).parameters(), lr=0.1, momentum=0.9, use_combined_accum=True)
    assert [s.dtype for s in plan(combined, fc).updates[0].states] == [torch.float32]


def test_step_has_one_element(fc):
    step = plan(optim.Adam(fc.parameters()), fc).states()["Step___weight"]
    assert torch.equal(step.initial_value(fc.weight), torch.zeros(1))


def test_tf_variant_starts_at_one(fc):
    made = plan(optim.RMSprop(fc.parameters(), use_tf_variant=True), fc)
    state = made.states()["Accl1___weight"]
    assert torch.equal(state.initial_value(fc.weight), torch.ones(2, 3))


def test_gradient_norm(fc):
    optimizer = optim.Adam(fc.parameters(), max_grad_norm=1.5)
    made = plan(optimizer, fc, gradient_accumulation=4)
    assert made.max_grad_norm == 1.5
    assert made.norm_attributes == {"divisor": 4.0}
    assert all(u.clipped and u.attributes["max_grad_norm"] == 1.5 for u in made.updates)
    assert plan(optim.Adam(fc.parameters()), fc).max_grad_norm is None


# --- Plans: combined SGD ------------------------------------------------------


def combined_sgd(fc, **more):
    settings = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.2}
    settings |= {"loss_scaling": 8.0, "velocity_scaling": 2.0, "use_combined_accum": True}
    return optim.SGD(fc.parameters(), **(settings | more))


def test_combined_sgd_accumulates_into_the_velocity(fc):
    made = plan(combined_sgd(fc), fc)
    update = made.updates[0]
    (accumulation,) = update.accumulations
    assert made.type_name == "SGD1"
    assert update.kind == "sgd_combined_update"
    assert update.gradient is GradientInput.NONE
    assert accumulation.kind == "sgd_combined_accumulate"
    assert accumulation.state is update.states[0]
    assert [s.name for s in update.all_states] == ["Accl___weight"]


def test_combined_velocity_starts_with_the_weight_decay(fc):
    state = plan(combined_sgd(fc), fc).states()["Accl___weight"]
    expected = 0.5 * 0.2 * 2.0 * fc.weight.detach()
    torch.testing.assert_close(state.initial_value(fc.weight), expected)


@pytest.mark.parametrize(
    ("accumulation", "replicas", "reduction", "rate", "dampening", "momentum"),
    [
        (1, 1, ReductionType.Mean, 0.05, 0.125, 0.9),
        (4, 1, ReductionType.Mean, 0.05, 0.03125, 0.9),
        (4, 1, ReductionType.Sum, 0.05, 0.125, 0.9),
        (4, 2, ReductionType.Mean, 0.025, 0.03125, 0.45),
        (4, 2, ReductionType.Sum, 0.025, 0.25, 0.45),
        (1, 2, ReductionType.Mean, 0.05, 0.0625, 0.9),
        (1, 2, ReductionType.Sum, 0.05, 0.125, 0.9),
    ],
)
def test_combined_scalars(fc, accumulation, replicas, reduction, rate, dampening, momentum):
    made = plan(
        combined_sgd(fc),
        fc,
        gradient_accumulation=accumulation,
        replicas=replicas,
        reduction=reduction,
    )
    assert values(made) == pytest.approx(
        {
            "scaledLearningRate1": rate,
            "scaledWeightDecay1": 0.2,
            "dampeningScaleFactor1": dampening,
            "scaledMomentum1": momentum,
        }
    )


def test_combined_sgd_with_clipping_needs_the_whole_gradient(fc):
    made = plan(combined_sgd(fc, max_grad_norm=1.0), fc, gradient_accumulation=2)
    update = made.updates[0]
    assert update.gradient is GradientInput.ACCUMULATOR
    assert [a.kind for a in update.accumulations] == ["accumulate"]


# --- Plans: scalars -----------------------------------------------------------


def test_plain_sgd_scalars(fc):
    optimizer = optim.SGD(
        fc.parameters(), lr=0.1, dampening=0.5, weight_decay=0.2, loss_scaling=8.0
    )
    made = plan(optimizer, fc, gradient_accumulation=2, replicas=2)
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


# --- Conversion errors --------------------------------------------------------


def test_unsupported_type(fc):
    with pytest.raises(AssertionError, match="Unsupported optimizer type Adagrad"):
        plan(torch.optim.Adagrad(fc.parameters()), fc)


def test_parameter_that_is_not_in_the_model(fc):
    optimizer = optim.SGD(torch.nn.Linear(5, 4).parameters(), lr=0.1)
    with pytest.raises(Error, match=r"shape \[4, 5\], is not in the model"):
        plan(optimizer, fc, all_parameters=dict(fc.named_parameters()))


def test_value_that_is_no_number(fc):
    optimizer = torch.optim.SGD(fc.parameters(), lr=torch.tensor(0.1))
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


# --- Warnings -----------------------------------------------------------------


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


# --- Replacing a plan ---------------------------------------------------------


def test_changed_variable_is_uploaded(fc):
    optimizer = optim.SGD(fc.parameters(), lr=0.1, momentum=0.9)
    old = plan(optimizer, fc)
    assert list(old.changed_scalars(plan(optimizer, fc))) == []
    optimizer.param_groups[0]["momentum"] = 0.8
    new = plan(optimizer, fc)
    old.check_replaceable(new)
    assert {s.name: s.value for s in old.changed_scalars(new)} == {
        "scaledMomentum2___specific___weight": 0.8,
        "scaledMomentum2___specific___bias": 0.8,
    }


REPLACEMENTS = [
    (
        lambda p: optim.SGD(p, lr=0.1),
        lambda p: optim.Adam(p, lr=0.1),
        "Optimizer types do not match",
    ),
    (
        lambda p: optim.Adam(p, lr=0.1, weight_decay=0.1),
        lambda p: optim.LAMB(p, lr=0.1, weight_decay=0.1),
        "Adam modes do not match",
    ),
    (
        lambda p: optim.Adam(p, lr=0.1),
        lambda p: optim.AdamW(p, lr=0.1),
        "Weight decay modes do not match",
    ),
    (
        lambda p: optim.AdamW(p, lr=0.1),
        lambda p: optim.AdamW(p, lr=0.1, bias_correction=False),
        "Adam modes do not match",
    ),
    (
        lambda p: optim.RMSprop(p, lr=0.1),
        lambda p: optim.RMSprop(p, lr=0.1, centered=True),
        "Adaptive modes do not match",
    ),
    (
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, use_combined_accum=True),
        "SGD accumulator and velocity modes do not match",
    ),
    (
        lambda p: optim.SGD(p, lr=0.1),
        lambda p: optim.SGD(p, lr=0.1, accum_type=torch.float16),
        "SGD accumulation types do not match",
    ),
    (
        lambda p: optim.SGD(p, lr=0.1),
        lambda p: optim.SGD(p, lr=0.1, max_grad_norm=1.0),
        "Maximum gradient norms do not match",
    ),
    (
        lambda p: optim.SGD(p, lr=0.1),
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
        "Can not replace a constant value with a non constant value: 'momentum'",
    ),
    (
        lambda p: optim.SGD(p, lr=0.1, weight_decay=0.1),
        lambda p: optim.SGD(p, lr=0.1),
        "Can not replace a non constant value with a constant value: 'weight_decay'",
    ),
    (
        lambda p: optim.SGD(p, lr=0.1),
        lambda p: optim.SGD(p, lr=0.1, loss_scaling=2.0),
        "Can not replace a constant value with a non constant value: 'loss_scaling'",
    ),
    (
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.9)),
        "Values are constant but do not match: 'beta1'",
    ),
    (
        lambda p: optim.SGD(p, lr=0.1),
        lambda p: optim.SGD([{"params": [x]} for x in p], lr=0.1),
        "Number of optimizer groups do not match: 1 and 2",
    ),
    (
        lambda p: optim.SGD(p, lr=0.1),
        lambda p: optim.SGD([next(iter(p))], lr=0.1),
        "Optimizer groups do not match: group 0",
    ),
]


@pytest.mark.parametrize(("before", "after", "message"), REPLACEMENTS)
def test_replacements_that_need_another_program(fc, before, after, message):
    old, new = (plan(make(fc.parameters()), fc) for make in (before, after))
    with pytest.raises(Error, match=message):
        old.check_replaceable(new)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            lambda p: optim.Adam(p, lr=0.1),
            lambda p: optim.Adam(p, lr=0.1, first_order_momentum_accum_type=torch.float16),
        ),
        (
            lambda p: optim.RMSprop(p, lr=0.1),
            lambda p: optim.RMSprop(p, lr=0.1, use_tf_variant=True),
        ),
        (
            lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.0),
            lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
        ),
        (lambda p: optim.SGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.2)),
    ],
    ids=["Adam accumulation types", "TF variant", "dampening", "torch for poptorch"],
)
def test_replacements_that_are_let_through(fc, before, after):
    old, new = (plan(make(fc.parameters()), fc) for make in (before, after))
    old.check_replaceable(new)


def test_new_loss_scaling_rescales_the_velocity(fc):
    optimizer = optim.SGD(fc.parameters(), lr=0.1, momentum=0.9, loss_scaling=2.0)
    old = plan(optimizer, fc)
    optimizer.loss_scaling = 8.0
    assert old.state_ratios(plan(optimizer, fc)) == {"Accl___weight": 4.0, "Accl___bias": 4.0}
    assert old.state_ratios(old) == {}


def test_new_velocity_scaling_rescales_the_combined_velocity(fc):
    optimizer = combined_sgd(fc)
    old = plan(optimizer, fc)
    optimizer.param_groups[0]["velocity_scaling"] = 1.0
    optimizer.loss_scaling = 1.0
    assert old.state_ratios(plan(optimizer, fc)) == {"Accl___weight": 0.5, "Accl___bias": 0.5}
