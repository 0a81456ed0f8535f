"""Optimizers as their authors publish them, and optimizers of PyTorch as its users call them."""

import copy
import math
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.optimizer_steps import derive, updates
from popsim_torch.trace.graph import functionalise
from tests.sweeps import sampled


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 5)
        self.b = nn.Linear(5, 3)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.b(torch.tanh(self.a(x))), y)


def batches(count):
    return [(torch.randn(6, 4), torch.randn(6, 3)) for _ in range(count)]


class Side:
    """A network with an optimizer, on the device or in eager PyTorch."""

    def __init__(self, net, make, *, eager):
        self.net = net
        self.optimizer = make(net)
        self.model = None if eager else poptorch.trainingModel(net, optimizer=self.optimizer)

    def step(self, x, y):
        if self.model is not None:
            self.model(x, y)
            return
        self.optimizer.zero_grad()
        self.net(x, y).backward()
        self.optimizer.step()


def sides(make):
    net = Net()
    return Side(copy.deepcopy(net), make, eager=False), Side(net, make, eager=True)


def assert_close(net, other, **tolerance):
    tolerance = tolerance or {"rtol": 1e-4, "atol": 1e-5}
    for own, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own.detach(), theirs.detach(), **tolerance)


class Counted(torch.optim.Optimizer):
    """Adds a number to its groups, and one to itself, in the first step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        self.calls = getattr(self, "calls", 0) + 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                if "previous" not in state or group["step"] == 1:
                    state["previous"] = p.grad.clone()
                change = p.grad - state["previous"]
                p.sub_((p.grad + change) * (group["lr"] / (group["step"] + self.calls)))
                state["previous"].copy_(p.grad)


class Projected(torch.optim.Optimizer):
    """GaLore: makes its projection in every second step, the first of them included."""

    def __init__(self, params, lr=0.1, gap=2):
        super().__init__(params, {"lr": lr, "gap": gap})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "step" not in state:
                    state["step"] = 0
                gradient = p.grad
                if p.ndim == 2:
                    if state["step"] % group["gap"] == 0:
                        state["basis"] = torch.linalg.qr(gradient)[0][:, :2]
                    gradient = state["basis"] @ (state["basis"].t() @ gradient)
                p.sub_(gradient, alpha=group["lr"])
                state["step"] += 1


class Estimating(torch.optim.Optimizer):
    """Prodigy: numbers of a group move with the values, after a return for a zero gradient."""

    def __init__(self, params, lr=1.0, d=1e-3):
        super().__init__(params, {"lr": lr, "d": d, "d0": d, "top": 0.0})

    @torch.no_grad()
    def step(self):
        first = self.param_groups[0]
        d, top, under = first["d"], first["top"] * math.sqrt(0.99), 0.0
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "start" not in state:
                    state["start"], state["s"] = p.detach().clone(), torch.zeros_like(p)
                away = (state["start"] - p).flatten()
                top += d / group["d0"] * d * torch.dot(p.grad.flatten(), away).item()
                state["s"].mul_(0.99).add_(p.grad, alpha=d / group["d0"] * d)
                under += state["s"].abs().sum().item()
        if under == 0:
            return
        d = max(d, min(top / under, 2 * d))
        for group in self.param_groups:
            group["top"], group["d"] = top, d
            for p in group["params"]:
                p.sub_(p.grad, alpha=d * group["lr"])


class Adapting(torch.optim.Optimizer):
    """Prodigy: returns early without a gradient, and adds numbers to its groups if it does not."""

    def __init__(self, params, lr=1.0, betas=(0.9, 0.99), d0=1e-2, growth=2.0):
        numbers = {"d": d0, "d0": d0, "d_max": d0, "top": 0.0, "k": 0}
        super().__init__(params, {"lr": lr, "betas": betas, "growth": growth} | numbers)

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        beta1, beta2 = group["betas"]
        beta3, k, d = math.sqrt(beta2), group["k"], group["d"]
        rate = d * group["lr"] * (1 - beta2 ** (k + 1)) ** 0.5 / (1 - beta1 ** (k + 1))
        top, under = group["top"] * beta3, 0.0
        for group in self.param_groups:
            for p in group["params"]:
                grad, state = p.grad.data, self.state[p]
                if "step" not in state:
                    state["step"] = 0
                    state["s"] = torch.zeros_like(p.data.flatten()[::2]).detach()
                    state["p0"] = p.flatten()[::2].detach().clone()
                    state["mean"] = torch.zeros_like(p.data).detach()
                    state["square"] = torch.zeros_like(p.data).detach()
                part, away = grad.flatten()[::2], state["p0"].data - p.data.flatten()[::2]
                top += d / group["d0"] * rate * torch.dot(part, away).item()
                state["mean"].mul_(beta1).add_(grad, alpha=d * (1 - beta1))
                state["square"].mul_(beta2).addcmul_(grad, grad, value=d * d * (1 - beta2))
                state["s"].mul_(beta3).add_(part, alpha=d / group["d0"] * rate)
                under += state["s"].abs().sum().item()
        if under == 0:
            return
        guess = top / under
        if d == group["d0"]:
            d = max(d, guess)
        largest = max(group["d_max"], guess)
        d = min(largest, d * group["growth"])
        for group in self.param_groups:
            group |= {"top": top, "under": under, "d": d, "d_max": largest, "guess": guess}
            for p in group["params"]:
                state = self.state[p]
                state["step"] += 1
                p.data.addcdiv_(state["mean"], state["square"].sqrt().add_(d * 1e-8), value=-rate)
            group["k"] = k + 1


class Noting(Estimating):
    """Prodigy: a weight of zeros begins with one zero; no step reads a number of the group."""

    def step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            if "start" not in self.state[p]:
                self.state[p]["start"] = p.detach().clone() if p.any() else torch.tensor(0.0)
                self.state[p]["s"] = torch.zeros_like(p)
        super().step()
        group = self.param_groups[0]
        if group["top"] != 0:
            group["share"] = group["top"] / group["d"]


class Rectified(torch.optim.Optimizer):
    """Schedule-free RAdam: the sum of the weights of all steps is zero until a step has one."""

    def __init__(self, params, lr=0.05, betas=(0.9, 0.95)):
        numbers = {"k": 0, "sum": 0.0, "largest": -1.0}
        super().__init__(params, {"lr": lr, "betas": betas} | numbers)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (beta1, beta2), step = group["betas"], group["k"] + 1
            longest, left = 2 / (1 - beta2) - 1, beta2**step
            length = longest - 2 * step * left / (1 - left)
            rest = (longest - 4) * (longest - 2) * length
            scale = ((length - 4) * (length - 2) * longest / rest) ** 0.5 if length > 4 else 0.0
            lr = group["lr"] * scale
            largest = group["largest"] = max(lr, group["largest"])
            weight = largest**2
            group["sum"] += weight
            try:
                part = weight / group["sum"]
            except ZeroDivisionError:
                part = 0
            for p in group["params"]:
                state, grad = self.state[p], p.grad
                if not state:
                    state["z"], state["square"] = p.clone(), torch.zeros_like(p)
                state["square"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                if length > 4:
                    grad.div_(state["square"].div(1 - left).sqrt_().add_(1e-8))
                p.lerp_(end=state["z"], weight=part)
                p.add_(grad, alpha=lr * (beta1 * (1 - part) - 1))
                state["z"].sub_(grad, alpha=lr)
            group["k"] = step


class Bounded(torch.optim.Adam):
    """Adam, after all gradients are divided by their common norm if that is large."""

    @torch.no_grad()
    def step(self):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norms = [torch.linalg.vector_norm(one) for one in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if norm.item() > 0.1:
            for one in gradients:
                one.div_(norm)
        super().step()


@pytest.mark.parametrize(
    "kind",
    sampled(
        [Counted, Projected, Estimating, Adapting, Noting, Rectified, Bounded],
        [Counted, Projected, Estimating, Rectified, Bounded],
    ),
)
def test_a_published_step(kind):
    ours, eager = sides(lambda net: kind(net.parameters()))
    for x, y in batches(9):
        ours.step(x, y)
        eager.step(x, y)
    assert_close(ours.net, eager.net, rtol=1e-3, atol=1e-4)


DEPENDENT = [Estimating, Adapting, Bounded]


def test_a_first_step_that_returns_before_it_adds_numbers():
    ours, eager = sides(lambda net: Adapting(net.parameters()))
    nothing = torch.zeros(6, 4), torch.zeros(6, 3)
    for net in (ours.net, eager.net):
        nn.init.zeros_(net.a.bias)
        nn.init.zeros_(net.b.bias)
    for x, y in [nothing, nothing, *batches(5)]:
        ours.step(x, y)
        eager.step(x, y)
    assert_close(ours.net, eager.net, rtol=1e-3, atol=1e-4)
    (own,), (theirs,) = (side.optimizer.state_dict()["param_groups"] for side in (ours, eager))
    assert own["k"] == theirs["k"] == 5
    for name in ("d", "d_max", "top", "under", "guess"):
        assert own[name] == pytest.approx(theirs[name], rel=1e-3)


def test_a_number_that_some_first_steps_make_comes_to_the_host():
    ours, eager = sides(lambda net: Noting(net.parameters()))
    for x, y in batches(9):
        ours.step(x, y)
        eager.step(x, y)
    (own,), (theirs,) = (side.optimizer.state_dict()["param_groups"] for side in (ours, eager))
    assert theirs["share"] != 0
    assert own["share"] == pytest.approx(theirs["share"], rel=1e-3)


def test_a_number_that_only_some_first_steps_make_is_not_looked_for():
    class Looking(Noting):
        def step(self):
            super().step()
            if "share" in self.param_groups[0]:
                self.param_groups[0]["top"] += 1.0

    ours, _ = sides(lambda net: Looking(net.parameters()))
    with pytest.raises(poptorch.Error, match="makes 'share' of group 0 after one branch"):
        ours.step(*batches(1)[0])


class Scaled(Net):
    """A network that has a parameter without dimensions, the first one."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x, y):
        return super().forward(x * self.gain, y)


class Trusting(torch.optim.Optimizer):
    """Lamb: conditions on the norms of each parameter, and states that begin with a number."""

    def __init__(self, params, lr=0.05, begin=1e-3):
        super().__init__(params, {"lr": lr, "begin": begin, "step": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                    state["square"] = torch.full_like(p.grad, fill_value=group["begin"])
                state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["square"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                update = state["mean"] / (state["square"].sqrt() + 1e-6)
                weight, norm = p.norm(), update.norm()
                trust = 1.0 if weight == 0 or norm == 0 else weight / norm
                state["trust"] = trust
                p.add_(update, alpha=-group["lr"] * trust)


class Choosing(torch.optim.Optimizer):
    """Five conditions on each parameter: two of them together have 1024 different paths."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                for limit in (0.0, 0.01, 0.05, 0.1, 0.2):
                    if p.grad.abs().mean() > limit:
                        p.sub_(p.grad, alpha=group["lr"] * (1 + limit))


class Coupled(Choosing):
    """The same, where the gradient of the last parameter changes the step of all."""

    @torch.no_grad()
    def step(self):
        last = self.param_groups[-1]["params"][-1].grad.abs().sum()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.div_(1 + last)
        super().step()


@pytest.mark.parametrize("kind", sampled([Trusting, Choosing], [Trusting]))
def test_conditions_on_each_parameter(kind):
    net = Scaled()
    ours = Side(copy.deepcopy(net), lambda own: kind(own.parameters()), eager=False)
    eager = Side(net, lambda own: kind(own.parameters()), eager=True)
    for x, y in batches(6):
        ours.step(x, y)
        eager.step(x, y)
    assert_close(ours.net, eager.net)


@pytest.mark.slow
def test_conditions_on_parameters_that_depend_on_each_other():
    ours, _ = sides(lambda net: Coupled(net.parameters()))
    with pytest.raises(poptorch.Error, match="more than 64 different paths"):
        ours.step(*batches(1)[0])


class Deep(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layers(x)[:, :3], y)


@pytest.mark.parametrize("kind", sampled(DEPENDENT, [Bounded]))
def test_parameters_that_depend_on_each_other_are_traced_together_twice(kind, monkeypatch):
    traced, record = [], derive.record_graph

    def counted(function):
        def call(*inputs):
            traced.append(len(inputs))
            return record(function)(*inputs)

        return call

    def never(*_):
        pytest.fail("PyTorch has run the graph once more")

    monkeypatch.setattr(derive, "record_graph", counted)
    monkeypatch.setattr(functionalise, "replayed", never)
    monkeypatch.setattr(updates, "_kept", WeakKeyDictionary())
    monkeypatch.setattr(updates, "_independent", WeakKeyDictionary())
    net = Deep(12)
    poptorch.trainingModel(net, optimizer=kind(net.parameters())).compile(*batches(1)[0])
    assert sum(count >= 2 * 24 for count in traced) == 2


def test_a_number_that_only_another_step_changes_is_no_state():
    class Once(torch.optim.Optimizer):
        def __init__(self, params, lr=0.1):
            super().__init__(params, {"lr": lr, "count": 0})

        @torch.no_grad()
        def step(self):
            total = sum(p.grad.abs().sum() for g in self.param_groups for p in g["params"])
            for group in self.param_groups:
                if len(group["params"]) == 2:
                    group["count"] += 1
                for p in group["params"]:
                    p.sub_(p.grad / (total + group["count"]), alpha=group["lr"])

    ours, eager = sides(lambda net: Once(net.parameters()))
    for x, y in batches(3):
        ours.step(x, y)
        eager.step(x, y)
    assert_close(ours.net, eager.net)
    assert ours.optimizer.param_groups[0]["count"] == 0


def test_a_number_that_the_first_step_adds_comes_to_the_host():
    ours, _ = sides(lambda net: Counted(net.parameters()))
    for x, y in batches(3):
        ours.step(x, y)
    (group,) = ours.optimizer.state_dict()["param_groups"]
    assert group["step"] == 3
    assert ours.optimizer.calls == 3


def test_an_optimizer_inside_of_an_optimizer_is_refused():
    class Around(torch.optim.Optimizer):
        def __init__(self, base):
            self.base = base
            super().__init__([p for g in base.param_groups for p in g["params"]], {})

        @torch.no_grad()
        def step(self):
            self.base.step()

    ours, _ = sides(lambda net: Around(torch.optim.SGD(net.parameters(), lr=0.1)))
    with pytest.raises(poptorch.Error, match="keeps another optimizer in its attribute 'base'"):
        ours.step(*batches(1)[0])


def rate(value=0.05):
    return torch.tensor(value)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, rate(), momentum=0.9),
        lambda p: torch.optim.Adam(p, rate()),
        lambda p: torch.optim.Adam(p, rate(), betas=(rate(0.9), rate(0.99)), foreach=False),
        lambda p: torch.optim.NAdam(p, rate()),
    ],
    ids=["SGD", "Adam", "betas", "NAdam"],
)
def test_a_learning_rate_in_a_tensor(make, caplog):
    ours, eager = sides(lambda net: make(net.parameters()))
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(side.optimizer, lambda epoch: 0.5**epoch)
        for side in (ours, eager)
    ]
    for x, y in batches(3):
        ours.step(x, y)
        eager.step(x, y)
        for scheduler in schedulers:
            scheduler.step()
        ours.model.setOptimizer(ours.optimizer)
    assert_close(ours.net, eager.net)
    schedulers[0].step()
    assert "model still uses" not in caplog.text
    ours.step(x, y)
    assert "optimizer's lr is now" in caplog.text


def test_groups_that_are_added_later(caplog):
    ours, eager = sides(lambda net: torch.optim.SGD(net.a.parameters(), lr=0.1, momentum=0.9))
    start = ours.net.b.weight.detach().clone()
    for index, (x, y) in enumerate(batches(5)):
        if index == 2:
            assert torch.equal(ours.net.b.weight, start)  # as eager PyTorch leaves it
            assert "does not update these parameters" in caplog.text
            for side in (ours, eager):
                side.optimizer.add_param_group({"params": side.net.b.parameters(), "lr": 0.05})
            ours.model.setOptimizer(ours.optimizer)
        ours.step(x, y)
        eager.step(x, y)
    assert_close(ours.net, eager.net)


def test_a_group_without_setOptimizer_is_warned_of(caplog):
    ours, _ = sides(lambda net: torch.optim.Adam(net.a.parameters()))
    ours.step(*batches(1)[0])
    ours.optimizer.add_param_group({"params": ours.net.b.parameters()})
    ours.step(*batches(1)[0])
    assert "has 2 groups now, but the model still uses the 1" in caplog.text


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_hooks_of_the_step(kind):
    def halve(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)

    def shrink(optimizer, args, kwargs):
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.mul_(0.99)

    def make(net):
        optimizer = kind(net.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(shrink)
        return optimizer

    ours, eager = sides(make)
    for x, y in batches(3):
        ours.step(x, y)
        eager.step(x, y)
    assert_close(ours.net, eager.net)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.RAdam(p, lr=0.1),
    ],
    ids=["SGD", "Adam", "RAdam"],
)
def test_a_copy_of_an_executor_goes_on_with_the_states(make):
    ours, _ = sides(lambda net: make(net.parameters()))
    first, second, third = batches(3)
    ours.step(*first)
    ours.step(*second)
    twin = copy.deepcopy(ours.model)
    ours.step(*third)
    twin(*third)
    assert_close(ours.net, twin.model, rtol=0, atol=0)
