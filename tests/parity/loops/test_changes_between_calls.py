"""A recorded function sees what has been done to its modules since."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional

import popsim_torch as poptorch
from popsim_torch.executor import weight_sync


def test_a_module_in_another_mode_is_recorded_anew():
    dropout, queue = nn.Dropout(0.5), poptorch.OutfeedQueue()

    @poptorch.function
    def drop():
        poptorch.repeat(1, lambda: queue.enqueue(dropout(torch.ones(1000, device="ipu"))))

    zeros = []
    for training in (True, False, True, False):
        dropout.train(training)
        drop()
        zeros.append(int((queue.dequeue() == 0).sum()))
    assert 400 < zeros[0] < 600 and 400 < zeros[2] < 600
    assert zeros[1] == zeros[3] == 0
    assert len(drop.programs) == 2


def freeze(model):
    model[0].requires_grad_(False)


def exchange(model):
    torch.manual_seed(5)
    model[0] = nn.Linear(6, 4)


def append(model):
    torch.manual_seed(6)
    model.append(nn.Linear(3, 3))


def exchange_weight(model):
    model[2].weight = nn.Parameter(torch.full((3, 4), 0.1))


@pytest.mark.parametrize("looks", [False, True], ids=["unseen", "seen"])
@pytest.mark.parametrize("change", [freeze, exchange, append, exchange_weight])
def test_a_model_that_has_changed_is_recorded_anew(change, looks):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(eager.parameters(), lr=0.1)
    data = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(8)]
    infeed = poptorch.InfeedQueue(data)

    def step(model, optimizer, x, y):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    @poptorch.function
    def train():
        poptorch.repeat(4, lambda x, y: step(model, optimizer, x, y), infeed=infeed)

    all_of_ours, all_of_theirs = list(model.parameters()), list(eager.parameters())
    for half in (data[:4], data[4:]):
        train()
        for x, y in half:
            step(eager, reference, x, y)
        if looks:
            model.state_dict()  # fetches what was trained
        change(model)
        change(eager)
        all_of_ours += model.parameters()
        all_of_theirs += eager.parameters()
    # Those that are not in the model any more have been trained while they were.
    for ours, theirs in zip(all_of_ours, all_of_theirs, strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)
    assert len(train.programs) == 2
    infeed.close()


def test_a_function_without_a_module():
    """As programs of notebooks and documents make them: their globals have no name."""
    code = "body = lambda x: (x + 1, queue.enqueue(x))"
    space = {"queue": poptorch.OutfeedQueue()}
    exec(code, space)
    assert space["body"].__module__ in (None, "builtins")

    @poptorch.function
    def run():
        return poptorch.repeat(3, space["body"], 0.0)

    assert run().item() == 3
    assert space["queue"].dequeue().tolist() == [0, 1, 2]


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def make_step(model, num_iterations, rate):
    """Return training steps of a model, by a function's loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    @poptorch.function
    def train():
        poptorch.repeat(
            num_iterations, lambda: step(model, optimizer, torch.ones(1, 3, device="ipu"))
        )

    return train


def test_functions_of_one_model_come_and_go_among_others():
    """What others train is taken over, also of a function that is made or dropped later."""
    torch.manual_seed(2)
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    eager, eager_other = copy.deepcopy(model), copy.deepcopy(other)
    first, unrelated = make_step(model, 1, 0.1), make_step(other, 1, 0.1)
    second = None
    executor = poptorch.inferenceModel(model)
    for call in range(8):
        first()
        unrelated()
        if call == 2:
            second = make_step(model, 2, 0.05)
        if call == 5:
            second = None
        if second is not None:
            second()
        for one, num_iterations, rate in (
            (eager, 1, 0.1),
            (eager_other, 1, 0.1),
            (eager, 2 if second else 0, 0.05),
        ):
            optimizer = torch.optim.SGD(one.parameters(), lr=rate)
            for _ in range(num_iterations):
                step(one, optimizer, torch.ones(1, 3))
        if call % 3 == 2:
            torch.testing.assert_close(executor(torch.ones(1, 3)), eager(torch.ones(1, 3)))
    torch.testing.assert_close(model.weight.detach(), eager.weight.detach())
    torch.testing.assert_close(other.weight.detach(), eager_other.weight.detach())


def test_a_call_looks_at_programs_of_its_own_weights_alone():
    gc.collect()  # models of other tests
    others = weight_sync._trainers.all()
    torch.manual_seed(3)
    model = nn.Linear(3, 2)
    functions = [make_step(one, 1, 0.1) for one in (model, nn.Linear(3, 2), model)]
    for _ in range(2):
        for function in functions:
            function()
    first, unrelated, second = (one.programs[0]._device.weights for one in functions)
    assert [one for one in first._known_others() if one not in others] == [second]
    assert not set(unrelated._known_others()) - set(others)
    loss = Loss()
    executor = poptorch.trainingModel(loss, optimizer=torch.optim.SGD(loss.parameters(), lr=0.1))
    executor(torch.ones(1, 3))
    assert executor._device.weights in unrelated._known_others()  # its parameters may be exchanged


class Loss(nn.Module):
    """A model that returns its loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return poptorch.identity_loss(self.layer(x), "sum")


@pytest.mark.parametrize(
    "change",
    [
        lambda weight, alias: weight.detach().mul_(2),
        lambda weight, alias: alias.mul_(2),
        lambda weight, alias: setattr(weight, "data", weight.data * 2),
        lambda weight, alias: torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * 2)),
    ],
    ids=["in place", "through a view of before", "other memory", "swapped"],
)
def test_weights_that_the_host_has_changed_are_taken_over(change):
    model, queue = nn.Linear(2, 1, bias=False), poptorch.OutfeedQueue()
    nn.init.ones_(model.weight)
    alias = model.weight.detach()

    @poptorch.function
    def look():
        poptorch.repeat(1, lambda: queue.enqueue(model(torch.ones(1, 2, device="ipu"))))

    values = []
    for call in range(3):
        look()
        values.append(queue.dequeue().item())
        if call == 1:
            change(model.weight, alias)
    assert values == [2, 2, 4]
