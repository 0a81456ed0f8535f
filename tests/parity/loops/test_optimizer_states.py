"""What an optimizer keeps goes with whichever program steps it next."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

import popsim_torch as poptorch

MAKE = {
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),) * 2,
    "Adam": (lambda p: torch.optim.Adam(p, lr=0.01),) * 2,
    "RMSprop": (lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),) * 2,
    "poptorch SGD": (
        lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ),
    "poptorch Adam": (
        lambda p: poptorch.optim.Adam(p, lr=0.01),
        lambda p: torch.optim.Adam(p, lr=0.01),
    ),
    "poptorch AdamW with loss scaling": (
        lambda p: poptorch.optim.AdamW(p, lr=0.01, loss_scaling=8.0),
        lambda p: torch.optim.AdamW(p, lr=0.01),
    ),
}


class Task:
    """A model that a loop trains, and the same model and data for eager PyTorch."""

    def __init__(self, make, num_batches=30):
        generator = torch.Generator().manual_seed(0)
        self.data = [
            (torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator))
            for _ in range(num_batches)
        ]
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(6, 3))
        self.eager = copy.deepcopy(self.model)
        ours, theirs = MAKE[make]
        self.optimizer = ours(self.model.parameters())
        self.reference = theirs(self.eager.parameters())
        self.infeed = poptorch.InfeedQueue(list(self.data))

    def step(self, x, y):
        self.optimizer.zero_grad()
        functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    def step_of_part(self, x, y):
        """The same, where other names lead to the weights."""
        layer = self.model[0]
        self.optimizer.zero_grad()
        functional.cross_entropy(layer(x), y).backward()
        self.optimizer.step()

    def train_eagerly(self, num_updates, accumulation=1):
        for _ in range(num_updates):
            self.reference.zero_grad()
            for _ in range(accumulation):
                x, y = self.data.pop(0)
                (functional.cross_entropy(self.eager(x), y) / accumulation).backward()
            self.reference.step()

    def check(self):
        for ours, theirs in zip(self.model.parameters(), self.eager.parameters(), strict=True):
            torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)
        self.infeed.close()


@pytest.mark.parametrize("make", MAKE)
def test_a_function_that_is_recorded_anew_goes_on(make):
    task = Task(make)

    @poptorch.function
    def train(trips):
        poptorch.repeat(trips, task.step, infeed=task.infeed)

    for trips in (10, 5, 10, 5):
        train(trips)
    task.train_eagerly(30)
    task.check()


@pytest.mark.parametrize("make", MAKE)
def test_loops_and_functions_continue_each_other(make):
    task = Task(make)

    @poptorch.function
    def twice():
        poptorch.repeat(5, task.step, infeed=task.infeed)
        poptorch.repeat(5, task.step_of_part, infeed=task.infeed)

    @poptorch.function
    def once():
        poptorch.repeat(5, task.step_of_part, infeed=task.infeed)

    @poptorch.function
    def accumulating():
        poptorch.repeat(10, task.step, infeed=task.infeed, gradient_accumulation=2)

    twice()
    once()
    twice.destroy()
    accumulating()
    once.destroy()
    once()
    task.train_eagerly(15)
    task.train_eagerly(5, accumulation=2)
    task.train_eagerly(5)
    task.check()


def test_each_parameter_has_the_state_of_who_stepped_it_last():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1, momentum=0.9)
    eager = copy.deepcopy([first, second])
    reference = torch.optim.SGD([p for one in eager for p in one.parameters()], 0.1, momentum=0.9)
    x = torch.ones(1, 2)

    def step(models, optimizer):
        optimizer.zero_grad()
        sum(model(x).square().sum() for model in models).backward()
        optimizer.step()

    @poptorch.function
    def both():
        poptorch.repeat(2, lambda: step([first, second], optimizer))

    @poptorch.function
    def one():
        poptorch.repeat(2, lambda: step([first], optimizer))

    @poptorch.function
    def other():
        poptorch.repeat(2, lambda: step([second], optimizer))

    both()
    one()
    other()
    both()
    for models in (eager, eager[:1], eager[1:], eager):
        for _ in range(2):
            step(models, reference)
    for ours, theirs in zip((first, second), eager, strict=True):
        torch.testing.assert_close(ours.weight.detach(), theirs.weight.detach())


def trained_optimizer():
    """Return a weak reference to an optimizer that nothing else needs any more."""
    task = Task("Adam")

    @poptorch.function
    def train():
        poptorch.repeat(5, task.step, infeed=task.infeed)

    train()
    task.infeed.close()
    return weakref.ref(task.optimizer)


def test_nothing_is_kept_of_an_optimizer_that_is_gone():
    optimizer = trained_optimizer()
    gc.collect()
    assert optimizer() is None


def test_the_state_of_a_poptorch_optimizer_is_that_of_the_last_run():
    task = Task("poptorch Adam")

    @poptorch.function
    def train(trips):
        poptorch.repeat(trips, task.step, infeed=task.infeed)

    for trips in (2, 3, 2):
        train(trips)
        task.train_eagerly(trips)
        expected = task.reference.state[task.eager[0].weight]["exp_avg"]
        states = task.optimizer.state_dict()["ipu_state"]
        (found,) = (
            states[name] for name in states if name.startswith("Accl1") and "weight" in name
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    task.check()


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
