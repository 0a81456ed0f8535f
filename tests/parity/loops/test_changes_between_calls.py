"""A recorded function sees what has been done to its modules since."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import popsim_torch as poptorch


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
