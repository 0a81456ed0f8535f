"""Anchored tensors have the values of eager PyTorch, in every mode."""

import copy

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch import OutputMode
from tests.parity.anchors.common import (
    ACTIVATIONS,
    INPUTS,
    LOOPS,
    SGD_NAMES,
    STATES,
    TOLERANCE,
    WEIGHTS,
    Case,
    Eager,
    make_batch,
    make_net,
    make_options,
)


@pytest.fixture(scope="module", params=LOOPS, ids=lambda p: f"D{p[0]}xGA{p[1]}")
def adam(request):
    return Case(*request.param, [f"{s}___{w}" for s in STATES for w in WEIGHTS], adam=True)


@pytest.fixture(scope="module", params=LOOPS, ids=lambda p: f"D{p[0]}xGA{p[1]}")
def sgd(request):
    return Case(*request.param, SGD_NAMES, adam=False)


@pytest.mark.parametrize("name", INPUTS)
def test_inputs(sgd, name):
    sgd.check(name, rtol=0, atol=0)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(sgd, name):
    sgd.check(name)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_of_activations(sgd, name):
    sgd.check(f"Gradient___{name}")


@pytest.mark.parametrize("name", WEIGHTS)
def test_gradients_of_weights(sgd, name):
    sgd.check(f"Gradient___{name}")


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_what_each_micro_batch_used(sgd, name):
    sgd.check(name)


@pytest.mark.parametrize("name", WEIGHTS)
def test_updated_weights(sgd, name):
    sgd.check(f"UpdatedVar___{name}")


@pytest.mark.parametrize("state", STATES)
def test_optimizer_state(adam, state):
    for weight in WEIGHTS:
        adam.check(f"{state}___{weight}", rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", [OutputMode.All, OutputMode.EveryN, OutputMode.Sum])
def test_accumulators_show_the_running_sum(mode):
    d, ga, name = 4, 2, "Accum___fc1.weight"
    net = make_net()
    twin = copy.deepcopy(net)
    options = make_options(d, ga)
    options.anchorTensor("accum", name, mode, 2)
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.125))
    x, y = make_batch(d, ga)
    model(x, y)
    eager = Eager(twin, torch.optim.SGD(twin.parameters(), lr=0.125), d, ga, x, y)
    expected = eager.expected(name, mode, 2, d, ga)
    torch.testing.assert_close(model.getAnchoredTensor("accum"), expected, **TOLERANCE)


@pytest.mark.parametrize("d, ga", [(1, 3), (4, 2)])
def test_the_final_accumulator_is_zero(d, ga):
    net = make_net()
    options = make_options(d, ga)
    options.anchorTensor("accum", "Accum___fc2.bias", OutputMode.Final)
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.125))
    model(*make_batch(d, ga))
    assert torch.equal(model.getAnchoredTensor("accum"), torch.zeros(3))


def test_the_stages_of_combined_sgd():
    """One tensor is accumulator and velocity: ``v = mm * v + sum of gradients / GA``."""
    d, ga, momentum = 2, 3, 0.5
    net = make_net()
    twin = copy.deepcopy(net)
    options = make_options(d, ga)
    names = [f"{s}___fc1.weight" for s in ("Accl", "AcclIntoReduce", "AcclOutOfAcclUpdate")]
    for name in names:
        options.anchorTensor(name, name, OutputMode.All)
    optimizer = poptorch.optim.SGD(
        net.parameters(), lr=0.125, momentum=momentum, use_combined_accum=True
    )
    model = poptorch.trainingModel(net, options, optimizer)
    x, y = make_batch(d, ga)
    model(x, y)
    eager = torch.optim.SGD(twin.parameters(), lr=0.125, momentum=momentum)
    running = Eager(twin, eager, d, ga, x, y).values["Accum___fc1.weight"]
    velocity = torch.zeros_like(running[0])
    partial, updated = [], []
    for i in range(d):
        partial += [velocity + running[i * ga + a] / ga for a in range(ga)]
        velocity = momentum * partial[-1]
        updated += [velocity] * ga
    into, out = torch.cat(partial), torch.cat(updated)
    torch.testing.assert_close(model.getAnchoredTensor(names[1]), into, **TOLERANCE)
    torch.testing.assert_close(model.getAnchoredTensor(names[2]), out, **TOLERANCE)
    torch.testing.assert_close(model.getAnchoredTensor(names[0]), out, **TOLERANCE)


def test_an_accumulator_of_running_means_keeps_the_last_one():
    d, ga = 2, 3
    net = make_net()
    twin = copy.deepcopy(net)
    options = make_options(d, ga)
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(
        poptorch.MeanReductionStrategy.Running
    )
    options.anchorTensor("final", "Accum___fc1.weight", OutputMode.Final)
    options.anchorTensor("every", "Accum___fc1.weight", OutputMode.All)
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.125))
    x, y = make_batch(d, ga)
    model(x, y)
    eager = Eager(twin, torch.optim.SGD(twin.parameters(), lr=0.125), d, ga, x, y)
    sums = eager.values["Accum___fc1.weight"]
    means = [total / (i % ga + 1) for i, total in enumerate(sums)]
    torch.testing.assert_close(model.getAnchoredTensor("every"), torch.cat(means), **TOLERANCE)
    torch.testing.assert_close(model.getAnchoredTensor("final"), means[-1], **TOLERANCE)


@pytest.mark.parametrize("first", [OutputMode.Final, OutputMode.All], ids=lambda m: m.name)
def test_accumulators_anchored_in_two_modes_do_not_depend_on_the_order(first):
    second = OutputMode.All if first == OutputMode.Final else OutputMode.Final
    net = make_net()
    options = make_options(2, 3)
    for mode in (first, second):
        options.anchorTensor(mode.name, "Accum___fc1.bias", mode)
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.125))
    model(*make_batch(2, 3))
    running = model.getAnchoredTensor("All").view(2, 3, 4)
    assert (running[:, :, 0] != 0).all()
    assert torch.equal(model.getAnchoredTensor("Final"), torch.zeros(4))


@pytest.mark.parametrize("d, ga", LOOPS)
def test_optimizer_scalars_are_repeated_for_every_micro_batch(d, ga):
    names = {
        "learningRate___specific___fc1.weight": 0.25,
        "weightDecay___specific___fc1.weight": 0.5,
        "adamBeta1___specific___fc1.weight": 0.75,
        "adamBeta2___specific___fc1.weight": 0.875,
        "lossScaling_FLOAT": 4.0,
        "adamGradientScaling___specific___fc1.weight": 4.0 * ga,
    }
    net = make_net()
    options = make_options(d, ga)
    for name in names:
        options.anchorTensor(f"{name} all", name, OutputMode.All)
        options.anchorTensor(f"{name} final", name, OutputMode.Final)
        options.anchorTensor(f"{name} sum", name, OutputMode.Sum)
    optimizer = poptorch.optim.Adam(
        net.parameters(), lr=0.25, weight_decay=0.5, betas=(0.75, 0.875), loss_scaling=4.0
    )
    model = poptorch.trainingModel(net, options, optimizer)
    model(*make_batch(d, ga))
    for name, value in names.items():
        every = torch.full((d * ga,), value) if d * ga > 1 else torch.tensor(value)
        assert torch.equal(model.getAnchoredTensor(f"{name} all"), every)
        assert torch.equal(model.getAnchoredTensor(f"{name} final"), torch.tensor(value))
        assert torch.equal(model.getAnchoredTensor(f"{name} sum"), torch.tensor(value * d * ga))


def test_a_scalar_shows_the_value_of_this_call():
    name = "scaledLearningRate0___specific___fc2.bias"
    net = make_net()
    options = make_options()
    options.anchorTensor("lr", name)
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.5))
    x, y = make_batch(1, 1)
    model(x, y)
    assert float(model.getAnchoredTensor("lr")) == 0.5
    model.setOptimizer(poptorch.optim.SGD(net.parameters(), lr=0.25))
    assert float(model.getAnchoredTensor("lr")) == 0.5
    model(x, y)
    assert float(model.getAnchoredTensor("lr")) == 0.25


def test_gradients_are_multiplied_by_the_loss_scale():
    x, y = make_batch(1, 1)

    def gradient(scale):
        net = make_net()
        options = make_options()
        options.anchorTensor("weight", "Gradient___fc1.weight")
        options.anchorTensor("seed", "Gradient___loss/Nll:0")
        optimizer = poptorch.optim.SGD(net.parameters(), lr=0.125, loss_scaling=scale)
        model = poptorch.trainingModel(net, options, optimizer)
        loss = model(x, y)[1]
        return model.getAnchoredTensor("weight"), model.getAnchoredTensor("seed"), loss

    plain, scaled = gradient(1.0), gradient(8.0)
    torch.testing.assert_close(scaled[0], plain[0] * 8, rtol=1e-6, atol=0)
    assert (float(plain[1]), float(scaled[1])) == (1.0, 8.0)
    assert torch.equal(scaled[2], plain[2])
