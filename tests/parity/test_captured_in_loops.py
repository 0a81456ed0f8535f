"""What loops of ``poptorch.function`` capture is what eager PyTorch computes."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import OutfeedOptimizerMode
from popsim_torch.observe import MaybeOutfeed, MaybeOutfeedQueue, OutfeedOptimizer

BEFORE, AFTER = OutfeedOptimizerMode.BEFORE_APPLY, OutfeedOptimizerMode.AFTER_COMPUTE
TRIPS = 6


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))


@pytest.fixture
def data():
    return torch.randn(TRIPS, 4, 3, generator=torch.Generator().manual_seed(1))


def eager(model, data, accumulation):
    """Train a copy; return activations, gradients of iterations and updates, and the copy."""
    model = copy.deepcopy(model)
    activations = []
    after = {f"{name}_grad": [] for name, _ in model.named_parameters()}
    before = copy.deepcopy(after)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for iteration, x in enumerate(data):
        previous = [0 if p.grad is None else p.grad.clone() for p in model.parameters()]
        activations.append(model[0](x).detach())
        model(x).square().mean().backward()
        for (name, p), old in zip(model.named_parameters(), previous, strict=True):
            after[f"{name}_grad"].append(p.grad - old)
        if (iteration + 1) % accumulation == 0:
            for name, p in model.named_parameters():
                p.grad /= accumulation
                before[f"{name}_grad"].append(p.grad.clone())
            sgd.step()
            sgd.zero_grad()
    stacked = [{k: torch.stack(v) for k, v in one.items()} for one in (after, before)]
    return torch.stack(activations), *stacked, model


def assert_close(found, expected):
    assert sorted(found) == sorted(expected)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, msg=key)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_training_loop_with_an_infeed(model, data, accumulation):
    hidden, iterations, updates, trained = eager(model, data, accumulation)
    queues = [MaybeOutfeedQueue(filters=["hidden"]), MaybeOutfeedQueue(), MaybeOutfeedQueue()]
    model.insert(1, MaybeOutfeed(queues[0], name="hidden"))
    names = {"3": "2"}  # after the layer that was put in
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = OutfeedOptimizer(OutfeedOptimizer(sgd, queues[1], AFTER), queues[2], model=model)
    infeed = poptorch.InfeedQueue(list(data))

    def step(x):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    @poptorch.function
    def train():
        poptorch.repeat(TRIPS, step, infeed=infeed, gradient_accumulation=accumulation)

    train()
    torch.testing.assert_close(queues[0].dequeue(), {"hidden": hidden})
    for queue, expected in ((queues[1], iterations), (queues[2], updates)):
        found = queue.dequeue()
        assert_close(
            {names.get(key[0], key[0]) + key[1:]: value for key, value in found.items()}, expected
        )
    for one, two in zip(model.parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(one, two)
    note = "Accumulated over 2 micro-batches: mean." if accumulation == 2 else ""
    assert queues[2].note == note


def test_without_the_model_keys_lead_from_the_function(model, data):
    queue = MaybeOutfeedQueue(filters=["2.bias"])
    optimizer = OutfeedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), queue)

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    @poptorch.function
    def train():
        poptorch.repeat(TRIPS, step, infeed=poptorch.InfeedQueue(list(data)))

    train()
    assert [*queue.dequeue()] == ["model.2.bias_grad"]


def test_two_optimizers_each_capture_their_own_parameters(model, data):
    first, second = MaybeOutfeedQueue(), MaybeOutfeedQueue()
    one = OutfeedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), first, model=model)
    adam = poptorch.optim.AdamW(model[2].parameters(), lr=0.1)
    two = OutfeedOptimizer(adam, second, model=model)

    def step(x):
        one.zero_grad()
        two.zero_grad()
        model(x).square().mean().backward()
        one.step()
        two.step()

    @poptorch.function
    def train():
        poptorch.repeat(TRIPS, step, infeed=poptorch.InfeedQueue(list(data)))

    train()
    assert [*first.dequeue()] == ["0.bias_grad", "0.weight_grad"]
    assert [*second.dequeue()] == ["2.bias_grad", "2.weight_grad"]
    assert adam.state_dict()["ipu_state"] is not None


def test_a_schedule_changes_the_rate_between_calls(model, data):
    queue = MaybeOutfeedQueue()
    optimizer = OutfeedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), queue, model=model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)

    def step():
        optimizer.zero_grad()
        model(data[0]).square().mean().backward()
        optimizer.step()

    @poptorch.function
    def train():
        poptorch.repeat(TRIPS, step)

    train()
    schedule.step()
    trained = copy.deepcopy(model.state_dict())
    train()
    assert torch.equal(trained["0.weight"], model.state_dict()["0.weight"])
    gradients = queue.dequeue()["0.weight_grad"]
    assert gradients.shape == (2 * TRIPS, 3, 3)
    assert not torch.equal(gradients[0], gradients[TRIPS])
    assert torch.equal(gradients[TRIPS], gradients[-1])


def test_a_dictionary_is_filled_in_the_body():
    queue = MaybeOutfeedQueue(filters=["double", "sum"])

    @poptorch.function
    def run(x):
        def body(value):
            queue.maybe_outfeed("value", value)
            queue.maybe_outfeed("double", value * 2)
            queue.maybe_outfeed("sum", value.sum())
            queue.maybe_enqueue()
            return value + 1

        return poptorch.repeat(3, body, x)

    run(torch.zeros(2))
    expected = {
        "double": torch.tensor([[0.0, 0], [2, 2], [4, 4]]),
        "sum": torch.tensor([0.0, 2, 4]),
    }
    torch.testing.assert_close(queue.dequeue(), expected)
