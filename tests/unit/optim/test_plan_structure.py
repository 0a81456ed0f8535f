"""The states, inputs and ops of an update plan."""

import pytest
import torch

from popsim_torch import optim
from popsim_torch.enums import ReductionType
from popsim_torch.optim.planning import GradientInput, read_optimizer
from tests.unit.optim.plans import combined_sgd, plan, values


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
        (lambda p: optim.AdamW(p, bias_correction=False), ["Accl1", "Accl2", "Step"]),
        (lambda p: optim.LAMB(p, bias_correction=False), ["Accl1", "Accl2"]),
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
    ("accumulation", "reduction", "dampening"),
    [
        (1, ReductionType.Mean, 0.125),
        (4, ReductionType.Mean, 0.03125),
        (4, ReductionType.Sum, 0.125),
    ],
)
def test_combined_scalars(fc, accumulation, reduction, dampening):
    made = plan(combined_sgd(fc), fc, gradient_accumulation=accumulation, reduction=reduction)
    assert values(made) == pytest.approx(
        {
            "scaledLearningRate1": 0.05,
            "scaledWeightDecay1": 0.2,
            "dampeningScaleFactor1": dampening,
            "scaledMomentum1": 0.9,
        }
    )


def test_combined_sgd_with_clipping_needs_the_whole_gradient(fc):
    made = plan(combined_sgd(fc, max_grad_norm=1.0), fc, gradient_accumulation=2)
    update = made.updates[0]
    assert update.gradient is GradientInput.ACCUMULATOR
    assert [a.kind for a in update.accumulations] == ["accumulate"]
