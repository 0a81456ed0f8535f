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
    def train(iterations):
        poptorch.repeat(iterations, task.step, infeed=task.infeed)

    for iterations in (10, 5, 10, 5):
        train(iterations)
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
    def train(iterations):
        poptorch.repeat(iterations, task.step, infeed=task.infeed)

    for iterations in (2, 3, 2):
        train(iterations)
        task.train_eagerly(iterations)
        expected = task.reference.state[task.eager[0].weight]["exp_avg"]
        states = task.optimizer.state_dict()["ipu_state"]
        (found,) = (
            states[name] for name in states if name.startswith("Accl1") and "weight" in name
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    task.check()


HOST = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


class HostTask(Task):
    """A task whose optimizer is used on the host, too."""

    def __init__(self, make):
        MAKE[make] = (HOST[make],) * 2
        try:
            super().__init__(make)
        finally:
            del MAKE[make]

        @poptorch.function
        def train(iterations):
            poptorch.repeat(iterations, self.step, infeed=self.infeed)

        self.train = train

    def train_both(self, iterations):
        self.train(iterations)
        self.train_eagerly(iterations)

    def train_ours_eagerly(self, iterations):
        """Both by PyTorch; the infeed has other batches by then."""
        for x, y in self.data[:iterations]:
            self.step(x, y)
            self.reference.zero_grad()
            functional.cross_entropy(self.eager(x), y).backward()
            self.reference.step()


def assert_same_state(ours, theirs):
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        for name, value in state.items():
            if not (name == "step" and "square_avg" in state):  # RMSprop's is for nothing
                torch.testing.assert_close(
                    ours["state"][number][name], value, rtol=1e-4, atol=1e-6, msg=name
                )


@pytest.mark.parametrize("make", HOST)
def test_the_dictionary_of_a_torch_optimizer_has_the_states_of_the_device(make):
    task = HostTask(make)
    for iterations in (4, 3):
        task.train_both(iterations)
        assert_same_state(task.optimizer.state_dict(), task.reference.state_dict())
    task.train.destroy()
    assert_same_state(task.optimizer.state_dict(), task.reference.state_dict())
    task.check()


@pytest.mark.parametrize("make", HOST)
def test_steps_on_the_host_and_on_the_device_continue_each_other(make):
    task = HostTask(make)
    task.train_ours_eagerly(2)
    task.train_both(4)
    task.train_ours_eagerly(3)
    task.train_both(4)
    task.train_both(2)
    task.check()


@pytest.mark.parametrize("make", HOST)
@pytest.mark.parametrize("fresh", [False, True], ids=["trained", "fresh"])
def test_a_checkpoint_is_taken_over(make, fresh):
    task = HostTask(make)
    if not fresh:
        task.train_both(3)
    saved = copy.deepcopy(task.optimizer.state_dict())
    task.train_both(4)
    task.optimizer.load_state_dict(saved)
    task.reference.load_state_dict(copy.deepcopy(saved))
    task.train_both(4)
    other = HOST[make](task.model.parameters())
    other.load_state_dict(task.optimizer.state_dict())
    task.optimizer = other
    task.train.destroy()
    task.train_both(4)
    task.check()
