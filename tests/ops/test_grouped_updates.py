"""Updates of several parameters by one op, against updates one by one: the same bits."""

import pytest
import torch

from popsim_torch import optim
from popsim_torch.optim.planning import plan_updates
from tests.ops.update_device import CASES, Device, some_weight

STEPS = 4
# Less than a block, several blocks with a short last one, nothing, a scalar, an exact block.
SMALL = {"a": (7,), "b": (3, 1023), "c": (0, 3), "d": (), "e": (512,), "f": (1,), "g": (33, 31)}
# Cut between threads, wherever that falls.
LARGE = {"a": (401, 97), "b": (11,), "c": (160, 1001), "d": (513,)}
CLIPPED = {
    "clipped momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, max_grad_norm=0.5),
    "clipped combined": lambda p: optim.SGD(
        p, lr=0.1, momentum=0.9, use_combined_accum=True, max_grad_norm=0.5
    ),
    "clipped Adam": lambda p: optim.Adam(p, lr=0.1, max_grad_norm=0.5),
}
MAKERS = {**{name: case.ours for name, case in CASES.items() if name != "SGD"}, **CLIPPED}


def train(make, shapes, *, grouped, micro_batches=1, dtype=torch.float32, **device_arguments):
    """Return every weight and state after some updates, and how many ops were grouped."""
    torch.manual_seed(2)
    weights = {name: some_weight(shape, dtype) for name, shape in shapes.items()}
    plan = plan_updates(make(weights.values()), weights, gradient_accumulation=micro_batches)
    device = Device(plan, weights, micro_batches, grouped=grouped, **device_arguments)
    for _ in range(STEPS):
        device.run(*(torch.randn(micro_batches, *w.shape).to(dtype) for w in weights.values()))
    return {name: device.read(name) for name in (*weights, *plan.states())}, device.num_grouped


def check_bits(make, shapes, **arguments):
    expected, _ = train(make, shapes, grouped=False, **arguments)
    values, num_grouped = train(make, shapes, grouped=True, **arguments)
    assert num_grouped == len(shapes) - 1
    assert values.keys() == expected.keys()
    for name, value in values.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_same_bits(make, dtype, micro_batches):
    check_bits(make, SMALL, dtype=dtype, micro_batches=micro_batches)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["SGD momentum", "Adam", "LAMB", "RMSprop centered"])
def test_the_same_bits_with_any_number_of_threads(name, count, threads):
    make = CASES[name].ours
    threads(1)
    expected, _ = train(make, LARGE, grouped=False)
    threads(count)
    values, num_grouped = train(make, LARGE, grouped=True)
    assert num_grouped == len(LARGE) - 1
    for key, value in values.items():
        assert torch.equal(value, expected[key]), key


def test_gradients_of_any_strides():
    strides = {"b": (1, 3), "g": (0, 1)}
    check_bits(CASES["Adam"].ours, SMALL, gradient_strides=strides)


def test_weights_of_several_types_share_an_op():
    """Each parameter keeps its own element type, that of its gradient and those of its states."""
    results = []
    for grouped in (False, True):
        torch.manual_seed(2)
        types = {"a": torch.float32, "b": torch.float16, "c": torch.bfloat16}
        weights = {name: some_weight((1000,), dtype) for name, dtype in types.items()}
        optimizer = optim.Adam(weights.values(), lr=0.1, accum_type=torch.float32)
        device = Device(plan_updates(optimizer, weights), weights, grouped=grouped)
        device.run(*(torch.randn(1000).to(dtype) for dtype in types.values()))
        results.append([device.read(name) for name in types])
        assert device.num_grouped == (2 if grouped else 0)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_each_parameter_has_its_own_hyper_parameters():
    weights = {name: some_weight((600,)) for name in "abc"}
    rates = {"a": 0.1, "b": 0.2, "c": 0.3}
    groups = [{"params": [weights[name]], "lr": rate} for name, rate in rates.items()]
    device = Device(
        plan_updates(optim.SGD(groups, lr=1.0, momentum=0.9), weights), weights, grouped=True
    )
    gradients = [torch.randn(600) for _ in weights]
    device.run(*gradients)
    assert device.num_grouped == 2
    for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
        expected = weight.detach() - rates[name] * gradient
        torch.testing.assert_close(device.read(name), expected)


def test_moments_with_betas_and_steps_of_their_own():
    """What parameters share of the bias correction is only shared where it is the same."""
    betas = {"a": (0.9, 0.999), "b": (0.8, 0.9), "c": (0.8, 0.9), "d": (0.8, 0.99)}
    weights = {name: some_weight((5,)) for name in betas}
    groups = [{"params": [weights[name]], "betas": pair} for name, pair in betas.items()]
    device = Device(plan_updates(optim.Adam(groups, lr=0.1), weights), weights, grouped=True)
    device.write("Step___c", torch.tensor([7.0]))
    gradients = {name: torch.randn(5) for name in weights}
    device.run(*gradients.values())
    for name, (beta1, beta2) in betas.items():
        step = 8 if name == "c" else 1
        g, w = gradients[name].double(), weights[name].detach().double()
        first = (1 - beta1) * g / (1 - beta1**step)
        second = (1 - beta2) * g**2 / (1 - beta2**step)
        expected = w - 0.1 * first / (second.sqrt() + 1e-8)
        torch.testing.assert_close(device.read(name).double(), expected, rtol=1e-5, atol=1e-6)
        assert device.read(f"Step___{name}").tolist() == [step]
