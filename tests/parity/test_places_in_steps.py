"""Steps of users that ask for the place of a parameter, or what a parameter or number is."""

import functools
import numbers
import types
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import popsim_torch as poptorch
from tests.parity.compare import quiet_options

X = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self, frozen=False):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)
        self.a.bias.requires_grad_(not frozen)

    def forward(self, x):
        return poptorch.identity_loss(self.b(torch.tanh(self.a(x))).square().mean(), "none")


def optimizer_with(factor, **defaults):
    """Return a class whose update of a parameter has a factor."""

    class Factors(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1, "count": 2, **defaults})

        @torch.no_grad()
        def step(self, closure=None):
            for g, group in enumerate(self.param_groups):
                for i, p in enumerate(group["params"]):
                    if p.grad is not None:
                        state = self.state[p]
                        state["steps"] = state.get("steps", 0) + 1
                        p.sub_(group["lr"] * factor(self, g, i, p) * p.grad)

    return Factors


def in_one_group(net):
    return net.parameters()


def in_two_groups(net):
    return [
        {"params": net.a.parameters(), "rates": [1.0, 0.5]},
        {"params": net.b.parameters(), "lr": 0.3, "rates": [0.25, 2.0]},
    ]


def named(net):
    return net.named_parameters()


def check(kind, groups=in_one_group, frozen=False):
    eager, net = Net(frozen), Net(frozen)
    optimizer = kind(groups(eager))
    model = poptorch.trainingModel(net, quiet_options(), kind(groups(net)))
    for x in X:
        optimizer.zero_grad()
        eager(x).backward()
        optimizer.step()
        model(x)
    for ours, theirs in zip(net.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def params(self, g):
    return self.param_groups[g]["params"]


PLACES = {
    "place": lambda self, g, i, p: i + 1,
    "decay by depth": lambda self, g, i, p: 0.8**i,
    "number": lambda self, g, i, p: 1 / len(params(self, g)),
    "last": lambda self, g, i, p: 0.5 if p is params(self, g)[-1] else 1,
    "size of all": lambda self, g, i, p: p.numel() / sum(q.numel() for q in params(self, g)),
    "largest": lambda self, g, i, p: 2 if p is max(params(self, g), key=torch.numel) else 1,
    "turns": lambda self, g, i, p: 2 if i % 2 == 1 else 1,
    "beside random numbers": lambda self, g, i, p: i + 1 + 0 * torch.rand(()),
    "no single parameter": lambda self, g, i, p: 1 / (len(params(self, g)) - 1),
}
GROUPS = {
    "place of the group": lambda self, g, i, p: g + 1,
    "number of groups": lambda self, g, i, p: 1 / len(self.param_groups),
    "first group": lambda self, g, i, p: self.param_groups[0]["lr"] * 10,
    "largest rate": lambda self, g, i, p: max(one["lr"] for one in self.param_groups) * 10,
    "rates": lambda self, g, i, p: self.param_groups[g]["rates"][i],
}


@pytest.mark.parametrize("name", PLACES)
def test_places(name):
    check(optimizer_with(PLACES[name]))


@pytest.mark.parametrize("name", GROUPS)
def test_places_of_groups(name):
    check(optimizer_with(GROUPS[name]), in_two_groups)


def test_a_step_that_needs_the_real_shapes():
    factors = {(4, 3): 1.0, (4,): 0.5, (2, 4): 2.0, (2,): 0.25}
    check(optimizer_with(lambda self, g, i, p: (i + 1) * factors[tuple(p.shape)]))


def test_a_hyper_parameter_that_hides_the_place():
    kind = optimizer_with(lambda self, g, i, p: self.param_groups[g]["decay"] ** i, decay=1.0)
    eager, net = Net(), Net()
    optimizer, ours = kind(eager.parameters()), kind(net.parameters())
    model = poptorch.trainingModel(net, quiet_options(), ours)
    for number, x in enumerate(X):
        optimizer.zero_grad()
        eager(x).backward()
        for one in (optimizer, ours):
            one.param_groups[0]["decay"] = 1.0 if number < 2 else 0.5
        model.setOptimizer(ours)
        optimizer.step()
        model(x)
    for found, expected in zip(net.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["place", "number"])
def test_places_among_parameters_that_are_not_trained(name):
    with pytest.raises(poptorch.Error, match="by its place among others"):
        check(optimizer_with(PLACES[name]), frozen=True)


def test_frozen_parameters_where_places_do_not_count():
    check(optimizer_with(lambda self, g, i, p: 2), frozen=True)


def test_random_numbers_beside_parameters_that_are_not_trained():
    net = Net(frozen=True)
    kind = optimizer_with(lambda self, g, i, p: 1 + torch.rand(()))
    model = poptorch.trainingModel(net, quiet_options(), kind(net.parameters()))
    before = net.a.weight.detach().clone()
    model(X[0])
    assert not torch.equal(net.a.weight, before)


def test_names_of_parameters():
    def factor(self, g, i, p):
        return 2 if "bias" in self.param_groups[g]["param_names"][i] else 1

    check(optimizer_with(factor), named)


def test_names_that_the_step_does_not_read():
    check(optimizer_with(lambda self, g, i, p: 2), named)


QUESTIONS = {
    "requires_grad": lambda p, lr, count, steps: p.requires_grad,
    "Parameter": lambda p, lr, count, steps: isinstance(p, nn.Parameter),
    "no Parameter": lambda p, lr, count, steps: not isinstance(p.grad, nn.Parameter),
    "float": lambda p, lr, count, steps: isinstance(lr, float) and not isinstance(lr, int),
    "number": lambda p, lr, count, steps: isinstance(lr, numbers.Number),
    "int": lambda p, lr, count, steps: isinstance(count, int) and not isinstance(count, float),
    "int of a state": lambda p, lr, count, steps: isinstance(steps, int),
    "arithmetic": lambda p, lr, count, steps: (
        isinstance(2 * count - 1, int) and isinstance(steps // 2, int)
    ),
    "quotient": lambda p, lr, count, steps: isinstance(steps / 2, float),
    "mixed": lambda p, lr, count, steps: isinstance(steps * lr, float),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_what_parameters_and_numbers_are(name):
    def factor(self, g, i, p):
        group = self.param_groups[g]
        return 2 if QUESTIONS[name](p, group["lr"], group["count"], self.state[p]["steps"]) else 1

    check(optimizer_with(factor))


@pytest.mark.parametrize(
    "among", [lambda steps: steps in {1, 2}, lambda steps: {1: 1, 2: 0}.get(steps, 0)]
)
def test_a_count_as_the_key_of_a_set_or_dict_is_refused(among):
    kind = optimizer_with(lambda self, g, i, p: 2 if among(self.state[p]["steps"]) else 1)
    with pytest.raises(poptorch.Error, match="as the key of a dict"):
        check(kind)


def powers(steps):
    quotient, rest = divmod(steps, 2)
    return quotient + 0.5 * rest


ARITHMETIC = {
    "number of true conditions": lambda steps: sum(steps >= one for one in (2, 3)) + 1,
    "condition times a number": lambda steps: 2.0 * (steps == 2) + (steps > 2) * 0.5 + 1,
    "divmod": powers,
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_of_counts_and_conditions(name):
    check(optimizer_with(lambda self, g, i, p: ARITHMETIC[name](self.state[p]["steps"])))


def test_bits_of_hyper_parameters():
    check(optimizer_with(lambda self, g, i, p: (1 << self.param_groups[g]["count"]) & 6))


def test_bits_of_a_count_are_refused():
    kind = optimizer_with(lambda self, g, i, p: self.state[p]["steps"] & 1)
    with pytest.raises(poptorch.Error, match="needs the value of a number in the operator 'and'"):
        check(kind)


def test_a_step_that_changes_parameters_without_a_gradient_is_refused():
    class Decays(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.mul_(0.9)
                if p.grad is not None:
                    p.sub_(0.1 * p.grad)

    check(Decays)
    with pytest.raises(poptorch.Error, match="changes parameters without a gradient"):
        check(Decays, frozen=True)


def with_its_own_step(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.step = types.MethodType(lambda self, closure=None: None, optimizer)
    return optimizer


def with_a_wrapped_step(net):
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    step = optimizer.step

    @functools.wraps(step)
    def wrapped(*args):
        return step(*args)

    optimizer.step = wrapped
    return optimizer


@pytest.mark.parametrize("make", [with_its_own_step, with_a_wrapped_step])
def test_a_replaced_step_is_refused(make):
    net = Net()
    with pytest.raises(poptorch.Error, match=f"has been replaced.*{__file__}:.*derive a class"):
        poptorch.trainingModel(net, quiet_options(), make(net))


class Skips:
    """An object in place of a step."""

    def __call__(self, closure=None):
        return None


def of_another_class(optimizer):
    return types.MethodType(torch.optim.Adam.step, optimizer)


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (lambda optimizer: Skips(), "by a Skips"),
        (lambda optimizer: functools.partial(Skips()), "by a Skips"),
        (lambda optimizer: mock.Mock(), "by a Mock"),
        (of_another_class, "by a function"),
    ],
)
def test_a_step_replaced_by_an_object_is_refused(step, what):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.step = step(optimizer)
    with pytest.raises(poptorch.Error, match=f"has been replaced .*{what}.*derive a class"):
        poptorch.trainingModel(net, quiet_options(), optimizer)


@pytest.mark.parametrize(
    "step",
    [lambda step: step, functools.partial, lambda step: torch.compile(step, backend="eager")],
)
def test_the_step_of_the_class_as_an_attribute(step):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.step = step(optimizer.step)
    before = net.a.weight.detach().clone()
    poptorch.trainingModel(net, quiet_options(), optimizer)(X[0])
    assert not torch.equal(net.a.weight, before)


def test_a_scheduler_in_the_optimizer_is_refused():
    class Scheduled(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self, 1)

        def step(self, closure=None):
            super().step()
            self.scheduler.step()

    net = Net()
    optimizer = Scheduled(net.parameters())
    with pytest.raises(poptorch.Error, match="keeps a scheduler in its attribute 'scheduler'"):
        poptorch.trainingModel(net, quiet_options(), optimizer)(X[0])
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_step_that_a_scheduler_wraps():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model = poptorch.trainingModel(net, quiet_options(), optimizer)
    before = net.a.weight.detach().clone()
    model(X[0])
    assert not torch.equal(net.a.weight, before)


def test_hooks_of_all_steps():
    def decay(optimizer, args, kwargs):
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.mul_(0.9)

    handle = register_optimizer_step_post_hook(decay)
    try:
        check(lambda params: torch.optim.SGD(params, lr=0.1))
    finally:
        handle.remove()
    check(lambda params: torch.optim.SGD(params, lr=0.1))
