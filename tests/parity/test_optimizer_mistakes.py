"""Mistakes in optimizers: the errors say which call fails, where, and what to do."""

import copy
import logging
import re

import numpy as np
import pytest
import torch
from torch import nn, optim

import popsim_torch as poptorch

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        return poptorch.identity_loss(self.fc(x).square().mean(), reduction="none")


def wrapped(make):
    net = Net()
    return net, poptorch.trainingModel(net, optimizer=make(net.parameters()))


class Stepping(optim.Optimizer):
    def __init__(self, parameters, step):
        super().__init__(parameters, {"lr": 0.1})
        self._do = [step]

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self._do[0](p)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (
            lambda p: p.sub_(torch.from_numpy(np.sign(p.grad.numpy()))),
            r"calls Tensor\.numpy at .*test_optimizer_mistakes\.py:\d+: .*functions of torch",
        ),
        (
            lambda p: p.sub_(torch.zeros(7)),
            r"call of sub_ at .*test_optimizer_mistakes\.py:\d+: The size of tensor a \(3\) must "
            r"match the size of tensor b \(7\)",
        ),
        (lambda p: p.copy_(p.grad.view(5)), "call of view at .*: shape '.5.' is invalid"),
    ],
)
def test_a_call_that_fails_is_named(step, text, caplog, capfd):
    net, model = wrapped(lambda p: Stepping(p, step))
    before = net.fc.weight.detach().clone()
    with pytest.raises(poptorch.Error, match=text):
        model(X)
    # (torch would log the traceback of its own functions)
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert "Traceback" not in capfd.readouterr().err
    model.setOptimizer(optim.Adagrad(net.parameters()))
    model(X)
    assert not torch.equal(before, net.fc.weight)


def test_an_exception_of_the_user_stays_as_it_is():
    def step(p):
        raise RuntimeError("my own")

    _, model = wrapped(lambda p: Stepping(p, step))
    with pytest.raises(RuntimeError, match=r"^my own$"):
        model(X)


class WithoutInit(optim.Optimizer):
    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters), "lr": 0.1}]
        self.state = {}

    def step(self, closure=None):
        raise AssertionError("it is never called")


def test_an_optimizer_that_does_not_initialise_its_base_class():
    with pytest.raises(poptorch.Error, match=r"WithoutInit.__init__ has to call super\(\)"):
        wrapped(WithoutInit)


@pytest.mark.parametrize("make", [optim.Adam, optim.NAdam, optim.Adagrad])
def test_a_state_of_another_model_is_refused_until_a_fitting_one_is_loaded(make):
    other = nn.Linear(7, 5)
    others = make(other.parameters())
    other(torch.ones(1, 7)).sum().backward()
    others.step()
    net = Net()
    optimizer = make(net.parameters())
    model = poptorch.trainingModel(net, optimizer=optimizer)
    model(X)
    own = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(others.state_dict())
    with pytest.raises(
        poptorch.Error, match=r"fc\.(weight|bias)' has the shape .* Load a state of"
    ):
        model(X)
    optimizer.load_state_dict(own)
    before = net.fc.weight.detach().clone()
    model(X)
    assert not torch.equal(before, net.fc.weight)


def test_dampening_is_warned_of_and_a_hook_gives_the_rule_of_pytorch(caplog):
    def make(parameters, hook):
        optimizer = optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.4)
        if hook:
            optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    wrapped(lambda p: make(p, False))
    (record,) = [one for one in caplog.records if "dampening applies" in one.getMessage()]
    assert "register_step_post_hook" in record.getMessage()
    caplog.clear()
    net, model = wrapped(lambda p: make(p, True))
    eager = copy.deepcopy(net)
    reference = make(eager.parameters(), False)
    for _ in range(3):
        reference.zero_grad()
        eager(X).backward()
        reference.step()
        model(X)
    torch.testing.assert_close(net.fc.weight, eager.fc.weight, rtol=1e-5, atol=1e-6)
    wrapped(lambda p: optim.SGD(p, lr=0.1, momentum=0.9))
    wrapped(lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.4))
    assert "dampening" not in caplog.text


@pytest.mark.parametrize(
    ("make", "name"),
    [(optim.Adam, "amsgrad"), (optim.SGD, "maximize"), (optim.RMSprop, "maximize")],
)
def test_a_switch_that_needs_another_step_says_so(make, name):
    net = Net()
    optimizer = make(net.parameters(), lr=0.1)
    model = poptorch.trainingModel(net, optimizer=optimizer)
    model(X)
    optimizer.param_groups[0][name] = True
    with pytest.raises(poptorch.Error, match=r"do not match: .* has to be traced, because of maxi"):
        model.setOptimizer(optimizer)
    optimizer.param_groups[0][name] = False
    before = net.fc.weight.detach().clone()
    model(X)
    assert not torch.equal(before, net.fc.weight)


class Warming(optim.AdamW):
    """Keeps the first rate in its group, from the first step on."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["t"] = group.get("t", 0) + 1
            first = group.setdefault("first", group["lr"])
            group["lr"] = first * min(1.0, group["t"] / 3)
        return super().step()


def test_a_number_of_a_group_that_only_the_first_step_makes():
    net = Net()
    eager = copy.deepcopy(net)
    own_optimizer = Warming(net.parameters(), lr=0.1)
    model = poptorch.trainingModel(net, optimizer=own_optimizer)
    optimizer = Warming(eager.parameters(), lr=0.1)
    for _ in range(5):
        model(X)
        optimizer.zero_grad()
        eager(X).backward()
        optimizer.step()
    torch.testing.assert_close(net.fc.weight.detach(), eager.fc.weight.detach())
    (own,), (theirs,) = (one.state_dict()["param_groups"] for one in (own_optimizer, optimizer))
    assert {name: own[name] for name in ("t", "first", "lr")} == pytest.approx(
        {name: theirs[name] for name in ("t", "first", "lr")}
    )


def test_a_number_that_only_some_first_steps_make_is_named():
    class Sometimes(optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if "seen" in group:
                        p.mul_(0.9)
                    if p.grad.sum().item() > 0:
                        group["seen"] = 1.0
            return super().step()

    _, model = wrapped(lambda p: Sometimes(p, lr=0.1))
    with pytest.raises(
        poptorch.Error, match=r"makes 'seen' of group 0 after one branch of an 'if'"
    ):
        model(X)


def recording(change):
    """Return an optimizer whose step has no ``@torch.no_grad()``."""

    class Recording(optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1})

        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                change(p)

    return Recording


IN_PLACE = "changes a parameter in place"


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.sub_(p.grad),
        lambda p: p.__imul__(0.5),
        lambda p: p.__setitem__(p.grad > 0, 0.5),
        lambda p: torch._foreach_sub_([p], [p.grad]),
    ],
)
def test_a_step_that_eager_pytorch_refuses_for_a_leaf_is_warned_of_once(change, caplog):
    kind = recording(change)
    eager = Net()
    optimizer = kind(eager.parameters())
    eager(X).backward()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        optimizer.step()
    net, model = wrapped(kind)
    before = net.fc.weight.detach().clone()
    model(X)
    model(X)
    assert not torch.equal(before, net.fc.weight)
    (message,) = [one.getMessage() for one in caplog.records if IN_PLACE in one.getMessage()]
    assert re.search(r"test_optimizer_mistakes\.py:\d+\) while .* Write @torch\.no_grad", message)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.data.sub_(p.grad),
        lambda p: setattr(p, "data", p.data - p.grad),
        lambda p: nn.init.zeros_(p),
        lambda p: torch.no_grad()(p.sub_)(p.grad),
        lambda p: [torch.no_grad()(p.sub_)(p.grad) for _ in p],
    ],
)
def test_a_step_that_eager_pytorch_takes_is_not_warned_of(change, caplog):
    kind = recording(change)
    eager = Net()
    optimizer = kind(eager.parameters())
    eager(X).backward()
    optimizer.step()
    _, model = wrapped(kind)
    model(X)
    assert IN_PLACE not in caplog.text
