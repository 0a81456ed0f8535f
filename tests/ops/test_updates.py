"""The accumulation and update ops, run on the device, against torch.optim."""

import pytest
import torch

from popsim_torch import optim
from popsim_torch.enums import ReductionType
from popsim_torch.optim.planning import plan_updates
from tests.ops.update_device import CASES, SHAPE, Device, some_weight

STEPS = 10
TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-6},
    torch.float16: {"rtol": 2e-2, "atol": 2e-3},
    torch.bfloat16: {"rtol": 5e-2, "atol": 5e-2},
}


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ten_updates_agree_with_torch(case, dtype, micro_batches):
    weight = some_weight(dtype=dtype)
    optimizer = case.ours([weight])
    plan = plan_updates(optimizer, {"w": weight}, gradient_accumulation=micro_batches)
    device = Device(plan, {"w": weight}, micro_batches)
    scale = plan.loss_scaling.value

    twin = torch.nn.Parameter(weight.detach().float())
    reference = case.reference([twin])
    for _ in range(STEPS):
        gradients = torch.randn(micro_batches, *SHAPE).to(dtype)
        device.run(gradients * scale)
        twin.grad = gradients.float().mean(0)
        reference.step()
    torch.testing.assert_close(device.read("w").float(), twin.detach(), **TOLERANCES[dtype])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_sum_reduction(case):
    weight = some_weight((5,))
    plan = plan_updates(
        case.ours([weight]),
        {"w": weight},
        gradient_accumulation=2,
        reduction=ReductionType.Sum,
    )
    device = Device(plan, {"w": weight}, 2)
    twin = torch.nn.Parameter(weight.detach().clone())
    reference = case.reference([twin])
    for _ in range(STEPS):
        gradients = torch.randn(2, 5)
        device.run(gradients * plan.loss_scaling.value)
        twin.grad = gradients.sum(0)
        reference.step()
    torch.testing.assert_close(device.read("w"), twin.detach(), **TOLERANCES[torch.float32])


MOMENTS = {
    "first_order_momentum_accum_type": torch.float16,
    "second_order_momentum_accum_type": torch.float16,
}
HALF_STATES = {
    "SGD": (optim.SGD, {"momentum": 0.9}, {"velocity_accum_type": torch.float16}),
    "Adam": (optim.Adam, {}, MOMENTS),
    "LAMB": (optim.LAMB, {}, MOMENTS),
    "RMSprop": (optim.RMSprop, {"centered": True, "eps": 0.1}, MOMENTS),
}


@pytest.mark.parametrize(("kind", "arguments", "types"), HALF_STATES.values(), ids=HALF_STATES)
def test_half_precision_states(kind, arguments, types):
    weight = some_weight()
    optimizer = kind([weight], lr=0.1, accum_type=torch.float16, **arguments, **types)
    plan = plan_updates(optimizer, {"w": weight}, gradient_accumulation=2, running_mean=True)
    device = Device(plan, {"w": weight}, 2)
    twin = torch.nn.Parameter(weight.detach().clone())
    reference = kind([twin], lr=0.1, **arguments)
    for _ in range(STEPS):
        # Squares of small gradients would vanish in half precision.
        gradients = (0.5 + torch.rand(2, *SHAPE)) * torch.randn(SHAPE).sign()
        device.run(gradients)
        twin.grad = gradients.mean(0)
        reference.step()
    torch.testing.assert_close(device.read("w"), twin.detach(), rtol=2e-2, atol=2e-2)


# --- Rules that torch does not have -------------------------------------------


@pytest.mark.parametrize("combined", [False, True])
def test_dampening_applies_from_the_first_step(combined):
    weight = some_weight((5,))
    optimizer = optim.SGD(
        [weight],
        lr=0.1,
        momentum=0.9,
        dampening=0.25,
        weight_decay=0.2,
        use_combined_accum=combined,
    )
    device = Device(plan_updates(optimizer, {"w": weight}), {"w": weight})
    w, v = weight.detach().clone(), torch.zeros(5)
    for _ in range(STEPS):
        g = torch.randn(5)
        device.run(g)
        v = 0.9 * v + 0.75 * (g + 0.2 * w)
        w = w - 0.1 * v
    torch.testing.assert_close(device.read("w"), w)


def test_dampening_without_momentum():
    weight = some_weight((5,))
    optimizer = optim.SGD([weight], lr=0.1, dampening=0.25, weight_decay=0.2)
    device = Device(plan_updates(optimizer, {"w": weight}), {"w": weight})
    g = torch.randn(5)
    device.run(g)
    torch.testing.assert_close(
        device.read("w"), weight.detach() - 0.1 * 0.75 * (g + 0.2 * weight.detach())
    )


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_tf_variant_of_rmsprop(momentum):
    weight = some_weight((5,))
    optimizer = optim.RMSprop([weight], lr=0.1, eps=1e-3, momentum=momentum, use_tf_variant=True)
    device = Device(plan_updates(optimizer, {"w": weight}), {"w": weight})
    w, a, b = weight.detach().clone(), torch.ones(5), torch.zeros(5)
    for _ in range(STEPS):
        g = torch.randn(5)
        device.run(g)
        a = 0.99 * a + 0.01 * g**2
        b = (momentum or 0.0) * b + 0.1 * g / (a + 1e-3).sqrt()
        w = w - b
    torch.testing.assert_close(device.read("w"), w)


def test_adamw_corrects_its_moments_whatever_it_is_told():
    weight = some_weight((5,))
    twin = torch.nn.Parameter(weight.detach().clone())
    optimizer = optim.AdamW([weight], lr=0.1, weight_decay=0.2, bias_correction=False)
    eager = torch.optim.AdamW([twin], lr=0.1, weight_decay=0.2)
    device = Device(plan_updates(optimizer, {"w": weight}), {"w": weight})
    for _ in range(STEPS):
        g = torch.randn(5)
        device.run(g)
        twin.grad = g
        eager.step()
    torch.testing.assert_close(device.read("w"), twin.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("initial", [0.0, 1.0])
def test_lamb_ratio_is_one_when_a_norm_is_zero(initial):
    weight = torch.nn.Parameter(torch.full((4,), initial))
    maximum = 65500.0 if initial == 0 else 0.0
    optimizer = optim.LAMB([weight], lr=0.1, weight_decay=0.0, max_weight_norm=maximum)
    device = Device(plan_updates(optimizer, {"w": weight}), {"w": weight})
    device.run(torch.ones(4))
    torch.testing.assert_close(device.read("w"), torch.full((4,), initial - 0.1))


# --- States ---------------------------------------------------------------------


def test_states_of_adam_are_torchs():
    weight = some_weight((5,))
    optimizer = optim.Adam([weight], lr=0.1)
    device = Device(plan_updates(optimizer, {"w": weight}), {"w": weight})
    for _ in range(STEPS):
        weight.grad = torch.randn(5)
        device.run(weight.grad)
        optimizer.step()
    state = optimizer.state[weight]
    torch.testing.assert_close(device.read("Accl1___w"), state["exp_avg"])
    torch.testing.assert_close(device.read("Accl2___w"), state["exp_avg_sq"], rtol=1e-4, atol=0)
    assert device.read("Step___w").tolist() == [STEPS]


def test_stored_velocity_is_scaled_by_the_loss_scale():
    weight = some_weight((5,))
    optimizer = optim.SGD([weight], lr=0.1, momentum=0.9, loss_scaling=8.0)
    device = Device(plan_updates(optimizer, {"w": weight}), {"w": weight})
    g = torch.randn(5)
    device.run(8 * g)
    torch.testing.assert_close(device.read("Accl___w"), 8 * g)


def test_change_of_loss_scale_between_updates():
    weight = some_weight((5,))
    optimizer = optim.SGD([weight], lr=0.1, momentum=0.9, loss_scaling=2.0)
    old = plan_updates(optimizer, {"w": weight})
    device = Device(old, {"w": weight})
    twin = torch.nn.Parameter(weight.detach().clone())
    reference = torch.optim.SGD([twin], lr=0.1, momentum=0.9)
    for loss_scaling in (2.0, 16.0, 4.0):
        optimizer.loss_scaling = loss_scaling
        new = plan_updates(optimizer, {"w": weight})
        for scalar in old.changed_scalars(new):
            device.write(scalar.name, torch.tensor(scalar.value))
        for name, ratio in old.state_ratios(new).items():
            device.write(name, device.read(name) * ratio)
        old = new
        twin.grad = torch.randn(5)
        device.run(loss_scaling * twin.grad)
        reference.step()
    torch.testing.assert_close(device.read("w"), twin.detach())


# --- Accumulation -----------------------------------------------------------------


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("accum_type", [torch.float32, torch.float16])
@pytest.mark.parametrize("running", [False, True])
def test_accumulator(gradient_dtype, accum_type, running):
    weight = some_weight()
    optimizer = optim.SGD([weight], lr=0.1, accum_type=accum_type)
    plan = plan_updates(optimizer, {"w": weight}, gradient_accumulation=4, running_mean=running)
    device = Device(plan, {"w": weight}, 4, gradient_dtype)
    for _ in range(2):
        gradients = torch.randn(4, *SHAPE).to(gradient_dtype)
        device.run(gradients)
    expected = gradients.float().mean(0) if running else gradients.float().sum(0)
    half = torch.float16 in (gradient_dtype, accum_type)
    torch.testing.assert_close(
        device.read("Accum___w").float(),
        expected,
        **TOLERANCES[torch.float16 if half else torch.float32],
    )
    assert device.read("Accum___w").dtype == accum_type


def test_running_mean_does_not_overflow():
    weight = some_weight((2,))
    optimizer = optim.SGD([weight], lr=0.5, accum_type=torch.float16)
    plan = plan_updates(optimizer, {"w": weight}, gradient_accumulation=4, running_mean=True)
    device = Device(plan, {"w": weight}, 4)
    device.run(torch.full((4, 2), 60000.0))
    assert device.read("Accum___w").tolist() == [60000.0, 60000.0]
    torch.testing.assert_close(device.read("w"), weight.detach() - 30000.0)


STRIDES = {"transposed": (1, 3), "expanded": (0, 1), "a scalar's": (0, 0)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("strides", STRIDES.values(), ids=STRIDES)
def test_gradients_of_any_strides(strides, micro_batches, dtype):
    weight = some_weight(dtype=dtype)
    plan = plan_updates(
        optim.SGD([weight], lr=0.5), {"w": weight}, gradient_accumulation=micro_batches
    )
    device = Device(plan, {"w": weight}, micro_batches, gradient_strides={"w": strides})
    stored = torch.randn(micro_batches, *SHAPE).to(dtype)
    device.run(stored)
    seen = stored.float().mean(0).contiguous().as_strided(SHAPE, strides)
    torch.testing.assert_close(
        device.read("w").float(), weight.detach().float() - 0.5 * seen, **TOLERANCES[dtype]
    )


@pytest.mark.parametrize("shape", [(), (0, 3), (1,)], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_small_parameters(case, shape):
    weight = some_weight(shape)
    plan = plan_updates(case.ours([weight]), {"w": weight})
    device = Device(plan, {"w": weight})
    twin = torch.nn.Parameter(weight.detach().clone())
    twin.grad = torch.randn(shape)
    device.run(plan.loss_scaling.value * twin.grad)
    case.reference([twin]).step()
    torch.testing.assert_close(device.read("w"), twin.detach())


# --- Clipping ---------------------------------------------------------------------

CLIPPED = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD combined": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "use_combined_accum": True}),
    "Adam": (optim.Adam, {"lr": 0.1, "eps": 0.1}),
    "AdamW": (optim.AdamW, {"lr": 0.1, "eps": 0.1}),
}


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("limit", [1e9, 0.5])
@pytest.mark.parametrize(("kind", "arguments"), CLIPPED.values(), ids=CLIPPED)
def test_clipping_is_that_of_the_true_gradient(kind, arguments, limit, micro_batches):
    weights = {"w": some_weight(), "b": some_weight((7,))}
    optimizer = kind(weights.values(), loss_scaling=8.0, max_grad_norm=limit, **arguments)
    plan = plan_updates(optimizer, weights, gradient_accumulation=micro_batches)
    device = Device(plan, weights, micro_batches)
    twins = {name: torch.nn.Parameter(w.detach().clone()) for name, w in weights.items()}
    reference = kind(twins.values(), **arguments)
    for _ in range(STEPS):
        gradients = {n: torch.randn(micro_batches, *w.shape) for n, w in weights.items()}
        device.run(*(8 * g for g in gradients.values()))
        for name, twin in twins.items():
            twin.grad = gradients[name].mean(0)
        torch.nn.utils.clip_grad_norm_(list(twins.values()), limit)
        reference.step()
    for name, twin in twins.items():
        torch.testing.assert_close(device.read(name), twin.detach(), rtol=1e-4, atol=1e-6)


# --- Threads ----------------------------------------------------------------------


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, max_grad_norm=0.5),
        lambda p: optim.Adam(p, lr=0.1),
        lambda p: optim.LAMB(p, lr=0.1),
        lambda p: optim.RMSprop(p, lr=0.1, centered=True),
    ],
    ids=["clipped SGD", "Adam", "LAMB", "RMSprop"],
)
def test_results_do_not_depend_on_the_number_of_threads(make, threads):
    weight = some_weight((401, 997))
    gradients = [torch.randn(401, 997) for _ in range(3)]
    results = []
    for count in (1, 2, 3):
        threads(count)
        device = Device(plan_updates(make([weight]), {"w": weight}), {"w": weight})
        for gradient in gradients:
            device.run(gradient)
        results.append(device.read("w"))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
