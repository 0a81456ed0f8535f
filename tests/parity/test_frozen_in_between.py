"""Parameters that are frozen, and trained again, between calls of a training model."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "poptorch's": lambda p: poptorch.optim.Adam(p, lr=0.01),
}
EAGER = {**OPTIMIZERS, "poptorch's": OPTIMIZERS["Adam"]}
SWITCHES = {
    "a module": lambda layer, on: layer.requires_grad_(on),
    "parameters": lambda layer, on: [p.requires_grad_(on) for p in layer.parameters()],
    "an attribute": lambda layer, on: [setattr(p, "requires_grad", on) for p in layer.parameters()],
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.last(self.first(x).tanh()), y)


def batches(count):
    torch.manual_seed(1)
    return [(torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(count)]


@pytest.fixture
def compilations():
    """Count the programs that are compiled."""
    seen = []
    hook = poptorch.registerPostCompileHook(lambda: seen.append(1))
    yield seen
    hook.remove()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
def test_frozen_and_trained_again(compilations, kind, switch):
    model, expected = Model(), Model()
    optimizer, eager = OPTIMIZERS[kind](model.parameters()), EAGER[kind](expected.parameters())
    executor = poptorch.trainingModel(model, make_options(), optimizer)
    for number, (x, y) in enumerate(batches(9)):
        if number in (3, 6):
            switch(model.first, number == 6)
            switch(expected.first, number == 6)
        executor(x, y)
        eager.zero_grad()
        expected(x, y).backward()
        eager.step()
    torch.testing.assert_close(dict(model.state_dict()), dict(expected.state_dict()))
    assert len(compilations) == 3


def test_what_is_the_same_in_the_end_compiles_nothing(compilations):
    model = Model()
    executor = poptorch.trainingModel(model, make_options(), OPTIMIZERS["Adam"](model.parameters()))
    inference = poptorch.inferenceModel(model, make_options())
    (x, y), *_ = batches(1)
    executor(x, y)
    inference(x, y)
    model.first.requires_grad_(False)
    inference(x, y)
    model.first.requires_grad_(True)
    executor(x, y)
    assert len(compilations) == 2


def test_states_that_rest_outlive_destroy():
    model, expected = Model(), Model()
    expected.load_state_dict(model.state_dict())
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    eager = OPTIMIZERS["momentum"](expected.parameters())
    executor = poptorch.trainingModel(model, make_options(), optimizer)
    (x, y), *_ = batches(1)
    for first_trains in (True, False, True):
        model.first.requires_grad_(first_trains)
        expected.first.requires_grad_(first_trains)
        executor(x, y)
        executor.destroy()
        eager.zero_grad()
        expected(x, y).backward()
        eager.step()
    torch.testing.assert_close(dict(model.state_dict()), dict(expected.state_dict()))
