"""Ten updates with every optimizer against the eager update, gradients included."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import optim
from popsim_torch.enums import ReductionType
from tests.parity.compare import Loop, Pair, quiet_options
from tests.parity.models import CASES
from tests.parity.tolerances import TRAINED

UPDATES = 10
BATCH = 4
MLP = CASES["mlp"]
Maker = Callable[[Any], torch.optim.Optimizer]


def train(pair: Pair, dtype: torch.dtype = torch.float32, updates: int = UPDATES) -> None:
    for _ in range(-(-updates // pair.loop.device_iterations)):
        inputs = MLP.inputs(BATCH * pair.loop.micro_batches)
        pair.step(*(x.to(dtype) if x.is_floating_point() else x for x in inputs))
    pair.finish()


def make_pair(ours: Maker, reference: Maker | None = None, **arguments: Any) -> Pair:
    """Return an MLP and its twin; the makers get the model's parameters."""
    return Pair(
        MLP.make(),
        lambda model: ours(model.parameters()),
        lambda model: (reference or ours)(model.parameters()),
        tolerance=TRAINED[torch.float32],
        **arguments,
    )


@dataclass(frozen=True)
class Rule:
    """A poptorch optimizer and the one that it must agree with.

    Attributes:
        ours: The poptorch class.
        arguments: What both get.
        reference: The other class.
        extra: What only ours gets.
    """

    ours: type
    arguments: dict[str, Any]
    reference: type
    extra: dict[str, Any] = field(default_factory=dict)

    def with_extra(self, **extra: Any) -> "Rule":
        return replace(self, extra={**self.extra, **extra})

    def make(self, parameters: Any) -> torch.optim.Optimizer:
        return self.ours(parameters, **self.arguments, **self.extra)

    def make_reference(self, parameters: Any) -> torch.optim.Optimizer:
        return self.reference(parameters, **self.arguments)


def sgd(extra: dict[str, Any] | None = None, **arguments: Any) -> Rule:
    return Rule(optim.SGD, {"lr": 0.1, **arguments}, torch.optim.SGD, extra or {})


COMBINED = {"use_combined_accum": True}
MOMENTUM = {"momentum": 0.9, "weight_decay": 0.05}
NESTEROV = {**MOMENTUM, "nesterov": True}
RULES = {
    "SGD": sgd(),
    "SGD weight decay": sgd(weight_decay=0.1),
    "SGD momentum": sgd(**MOMENTUM),
    "SGD nesterov": sgd(**NESTEROV),
    "SGD combined": sgd(COMBINED, **MOMENTUM),
    "SGD combined nesterov": sgd({**COMBINED, "velocity_scaling": 4.0}, **NESTEROV),
    "SGD combined plain": sgd(COMBINED, momentum=0.0, weight_decay=0.1),
    "Adam": Rule(optim.Adam, {"lr": 0.01}, torch.optim.Adam),
    "Adam weight decay": Rule(
        optim.Adam,
        {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-6},
        torch.optim.Adam,
    ),
    "AdamW": Rule(optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}, torch.optim.AdamW),
    "RMSprop": Rule(optim.RMSprop, {"lr": 0.01, "weight_decay": 0.1}, torch.optim.RMSprop),
    "RMSprop momentum": Rule(
        optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "alpha": 0.9}, torch.optim.RMSprop
    ),
    "RMSprop centered": Rule(
        optim.RMSprop, {"lr": 0.01, "centered": True, "eps": 1e-4}, torch.optim.RMSprop
    ),
    "RMSprop centered momentum": Rule(
        optim.RMSprop,
        {"lr": 0.01, "centered": True, "momentum": 0.5, "eps": 1e-4},
        torch.optim.RMSprop,
    ),
    "LAMB": Rule(optim.LAMB, {"lr": 0.01, "weight_decay": 0.1}, optim.LAMB),
    "LAMB uncorrected": Rule(
        optim.LAMB, {"lr": 0.01, "bias_correction": False, "max_weight_norm": 2.0}, optim.LAMB
    ),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_ten_updates(rule):
    train(make_pair(rule.make, rule.make_reference))


LOOPS = [Loop(2, 3, ReductionType.Mean), Loop(1, 2, ReductionType.Sum)]
LOOPED = ["SGD momentum", "SGD combined", "Adam", "RMSprop centered", "LAMB"]


@pytest.mark.parametrize("loop", LOOPS, ids=str)
@pytest.mark.parametrize("name", LOOPED)
def test_ten_updates_from_several_micro_batches(name, loop):
    rule = RULES[name]
    train(make_pair(rule.make, rule.make_reference, loop=loop))


TORCHS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, **MOMENTUM),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.1, **NESTEROV),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.9)),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5, eps=1e-4),
}


@pytest.mark.parametrize("make", TORCHS.values(), ids=TORCHS)
def test_torchs_own_optimizers(make):
    train(make_pair(make))


def test_no_optimizer_is_sgd():
    model = MLP.make()
    pair = make_pair(lambda p: torch.optim.SGD(p, lr=0.01))
    model.load_state_dict(pair.twin.state_dict())
    device = poptorch.trainingModel(model, quiet_options())
    for _ in range(3):
        inputs = MLP.inputs(BATCH)
        device(*inputs)
        pair.step(*inputs)
    for ours, expected in zip(model.parameters(), pair.twin.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), expected.detach())


# --- Rules that torch does not have ----------------------------------------------------------


class ByHand(torch.optim.Optimizer):
    """An optimizer whose update of one parameter is ``rule(weight, gradient, state)``."""

    def __init__(self, parameters: Any, rule: Callable[..., None]) -> None:
        super().__init__(parameters, {})
        self._rule = rule

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                self._rule(weight, weight.grad, self.state[weight])


@pytest.mark.parametrize("combined", [False, True])
def test_dampening_acts_from_the_first_step(combined):
    def rule(w, g, state):
        v = 0.9 * state.get("v", torch.zeros_like(w)) + 0.75 * (g + 0.05 * w)
        state["v"] = v
        w -= 0.1 * v

    def ours(parameters):
        return optim.SGD(
            parameters, lr=0.1, dampening=0.25, use_combined_accum=combined, **MOMENTUM
        )

    train(make_pair(ours, lambda parameters: ByHand(parameters, rule)))


def test_dampening_of_plain_torch_sgd_is_the_devices():
    def rule(w, g, state):
        state["v"] = 0.9 * state.get("v", torch.zeros_like(w)) + 0.5 * g
        w -= 0.1 * state["v"]

    def ours(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5)

    train(make_pair(ours, lambda parameters: ByHand(parameters, rule)))


@pytest.mark.parametrize("momentum", [None, 0.8])
def test_rmsprop_tf_variant(momentum):
    def rule(w, g, state):
        a = 0.9 * state.get("a", torch.ones_like(w)) + 0.1 * g**2
        buffer = (momentum or 0.0) * state.get("b", torch.zeros_like(w))
        buffer = buffer + 0.01 * g / (a + 1e-3).sqrt()
        state.update(a=a, b=buffer)
        w -= buffer

    def ours(parameters):
        return optim.RMSprop(
            parameters, lr=0.01, alpha=0.9, eps=1e-3, momentum=momentum, use_tf_variant=True
        )

    train(make_pair(ours, lambda parameters: ByHand(parameters, rule)))


def test_adamw_corrects_its_moments_whatever_it_is_told():
    settings = {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1}

    def ours(parameters):
        return optim.AdamW(parameters, bias_correction=False, **settings)

    train(make_pair(ours, lambda parameters: torch.optim.AdamW(parameters, **settings)))


# --- Values that change without compiling again ----------------------------------------------

SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, UPDATES),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=UPDATES + 2),
}
SCHEDULED = {
    "SGD momentum": (
        lambda p: optim.SGD(p, lr=0.1, **MOMENTUM),
        lambda p: torch.optim.SGD(p, lr=0.1, **MOMENTUM),
    ),
    "SGD combined": (
        lambda p: optim.SGD(p, lr=0.1, use_combined_accum=True, **MOMENTUM),
        lambda p: torch.optim.SGD(p, lr=0.1, **MOMENTUM),
    ),
    "Adam": (
        lambda p: optim.Adam(p, lr=0.01, betas=(0.9, 0.999)),
        lambda p: torch.optim.Adam(p, lr=0.01),
    ),
}


# The device makes the updates: torch's optimizer.step is never called.
never_stepped = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


@never_stepped
@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("name", SCHEDULED)
def test_schedulers(name, schedule):
    if (name, schedule) == ("SGD combined", "one cycle"):
        pytest.skip("a new momentum reaches the combined velocity one update later")
    ours, reference = SCHEDULED[name]
    pair = make_pair(ours, reference)
    schedulers = [SCHEDULERS[schedule](o) for o in (pair.optimizer, pair.eager.optimizer)]
    compiled = None
    for _ in range(UPDATES):
        pair.device.setOptimizer(pair.optimizer)
        pair.step(*MLP.inputs(BATCH))
        for scheduler in schedulers:
            scheduler.step()
        compiled = compiled or pair.device.compiled
        assert pair.device.compiled is compiled
    pair.finish()


@never_stepped
def test_scheduler_of_a_torch_optimizer():
    pair = make_pair(lambda p: torch.optim.AdamW(p, lr=0.01))
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        for optimizer in (pair.optimizer, pair.eager.optimizer)
    ]
    for _ in range(UPDATES):
        pair.step(*MLP.inputs(BATCH))
        for scheduler in schedulers:
            scheduler.step()
        pair.device.setOptimizer(pair.optimizer)
    pair.finish()


def test_a_changed_learning_rate_needs_set_optimizer():
    pair = make_pair(lambda p: optim.SGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1))
    pair.step(*MLP.inputs(BATCH))
    pair.optimizer.param_groups[0]["lr"] = 0.0
    pair.step(*MLP.inputs(BATCH))
    pair.device.setOptimizer(pair.optimizer)
    pair.eager.optimizer.param_groups[0]["lr"] = 0.0
    pair.step(*MLP.inputs(BATCH))
    pair.finish()


def test_momentum_can_be_raised_from_a_variable_zero():
    pair = make_pair(
        lambda p: optim.SGD(p, lr=0.1, momentum=0.0), lambda p: torch.optim.SGD(p, lr=0.1)
    )
    velocity: dict[torch.Tensor, torch.Tensor] = {}

    def rule(w, g, _state):
        # With momentum 0 the velocity is the last gradient.
        velocity[w] = momentum * velocity.get(w, torch.zeros_like(w)) + g
        w -= 0.1 * velocity[w]

    momentum = 0.0
    pair.eager.optimizer = ByHand(pair.twin.parameters(), rule)
    pair.step(*MLP.inputs(BATCH))
    momentum = 0.9
    pair.optimizer.param_groups[0]["momentum"] = 0.9
    pair.device.setOptimizer(pair.optimizer)
    train(pair, updates=3)


# --- Groups ----------------------------------------------------------------------------------


def groups(model: nn.Module, **own: Any) -> list[dict[str, Any]]:
    """Return the first layer with its own values, the other weights, and the other biases."""
    layers = model.layers
    return [
        {"params": layers[0].parameters(), "lr": 0.02, "weight_decay": 0.2, **own},
        {"params": [layers[2].weight, layers[4].weight]},
        {"params": [layers[2].bias, layers[4].bias], "weight_decay": 0.0},
    ]


GROUPED = {
    "SGD": (
        lambda m: optim.SGD(groups(m, momentum=0.5), lr=0.1, **MOMENTUM),
        lambda m: torch.optim.SGD(groups(m, momentum=0.5), lr=0.1, **MOMENTUM),
    ),
    "SGD combined": (
        lambda m: optim.SGD(groups(m), lr=0.1, use_combined_accum=True, **MOMENTUM),
        lambda m: torch.optim.SGD(groups(m), lr=0.1, **MOMENTUM),
    ),
    "Adam": (
        lambda m: optim.Adam(groups(m, betas=(0.5, 0.9), eps=1e-5), lr=0.01),
        lambda m: torch.optim.Adam(groups(m, betas=(0.5, 0.9), eps=1e-5), lr=0.01),
    ),
    "torch AdamW": (
        lambda m: torch.optim.AdamW(groups(m), lr=0.01),
        lambda m: torch.optim.AdamW(groups(m), lr=0.01),
    ),
    "RMSprop": (
        lambda m: optim.RMSprop(groups(m, alpha=0.5), lr=0.01),
        lambda m: torch.optim.RMSprop(groups(m, alpha=0.5), lr=0.01),
    ),
    "LAMB": (
        lambda m: optim.LAMB(groups(m, betas=(0.5, 0.9)), lr=0.01),
        lambda m: optim.LAMB(groups(m, betas=(0.5, 0.9)), lr=0.01),
    ),
}


@pytest.mark.parametrize(("ours", "reference"), GROUPED.values(), ids=GROUPED)
def test_groups(ours, reference):
    pair = Pair(MLP.make(), ours, reference, tolerance=TRAINED[torch.float32])
    for step in range(UPDATES):
        if step == 5:
            for optimizer in (pair.optimizer, pair.eager.optimizer):
                optimizer.param_groups[1]["lr"] = 0.005
            pair.device.setOptimizer(pair.optimizer)
        pair.step(*MLP.inputs(BATCH))
    pair.finish()


def test_frozen_parameters_stay():
    pair = make_pair(
        lambda p: optim.SGD(p, lr=0.1, **MOMENTUM), lambda p: torch.optim.SGD(p, lr=0.1, **MOMENTUM)
    )
    model = MLP.make()
    model.layers[2].requires_grad_(False)
    frozen = Pair(
        model,
        lambda m: optim.SGD(m.parameters(), lr=0.1, **MOMENTUM),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, **MOMENTUM),
        tolerance=TRAINED[torch.float32],
    )
    before = model.layers[2].weight.clone()
    for each in (pair, frozen):
        train(each, updates=3)
    assert torch.equal(model.layers[2].weight, before)


# --- Loss scaling, clipping, half precision --------------------------------------------------

SCALED = ["SGD", "SGD momentum", "SGD combined", "Adam", "RMSprop", "LAMB"]


@pytest.mark.parametrize("name", SCALED)
def test_loss_scaling_shows_in_gradients_only(name):
    # The pair expects gradients that are scaled, losses and weights that are not.
    rule = RULES[name].with_extra(loss_scaling=128.0)
    train(make_pair(rule.make, rule.make_reference, loop=Loop(1, 2)))


def test_loss_scaling_can_change():
    pair = make_pair(
        lambda p: optim.SGD(p, lr=0.1, loss_scaling=2.0, **MOMENTUM),
        lambda p: torch.optim.SGD(p, lr=0.1, **MOMENTUM),
    )
    for loss_scaling in (2.0, 64.0, 8.0):
        pair.optimizer.loss_scaling = loss_scaling
        pair._scale = loss_scaling
        pair.device.setOptimizer(pair.optimizer)
        pair.step(*MLP.inputs(BATCH))
    pair.finish()


# A large eps keeps the size of Adam's updates that of the gradients.
CLIPPED = {
    "SGD": sgd(),
    "SGD momentum": sgd(momentum=0.9),
    "SGD combined": sgd(COMBINED, momentum=0.9),
    "Adam": Rule(optim.Adam, {"lr": 0.01, "eps": 0.1}, torch.optim.Adam),
    "AdamW": Rule(optim.AdamW, {"lr": 0.01, "eps": 0.1}, torch.optim.AdamW),
}


@pytest.mark.parametrize("loop", [Loop(), Loop(1, 3)], ids=str)
@pytest.mark.parametrize("rule", CLIPPED.values(), ids=CLIPPED)
def test_max_grad_norm(rule, loop):
    rule = rule.with_extra(max_grad_norm=0.2, loss_scaling=16.0)
    train(make_pair(rule.make, rule.make_reference, loop=loop, max_grad_norm=0.2))


HALF = ["SGD momentum", "SGD combined", "Adam weight decay", "AdamW", "RMSprop", "LAMB"]


@pytest.mark.parametrize("name", HALF)
def test_half_precision_weights(name):
    rule = RULES[name].with_extra(loss_scaling=16.0)
    model = MLP.make(smooth=True).half()
    pair = Pair(
        model,
        lambda m: rule.make(m.parameters()),
        lambda m: rule.make_reference(m.parameters()),
        tolerance=TRAINED[torch.float16],
        loop=Loop(1, 2),
    )
    pair.twin.float()
    eager = pair.eager
    pair.eager = lambda *inputs: eager(*(x.float() if x.is_floating_point() else x for x in inputs))
    train(pair, torch.float16)


# --- State -----------------------------------------------------------------------------------


def test_state_goes_from_one_model_to_another():
    pair = make_pair(lambda p: optim.Adam(p, lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01))
    train(pair, updates=5)
    model = MLP.make()
    model.load_state_dict(pair.model.state_dict())
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    optimizer.load_state_dict(pair.optimizer.state_dict())
    device = poptorch.trainingModel(model, quiet_options(), optimizer)
    for _ in range(5):
        inputs = MLP.inputs(BATCH)
        device(*inputs)
        pair.eager(*inputs)
    for ours, expected in zip(model.parameters(), pair.twin.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), expected.detach(), rtol=1e-4, atol=1e-6)


def test_destroy_keeps_weights_and_state():
    pair = make_pair(lambda p: optim.Adam(p, lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01))
    pair.step(*MLP.inputs(BATCH))
    pair.device.destroy()
    for _ in range(3):
        # Compiles again, for another batch.
        pair.step(*MLP.inputs(2 * BATCH))
    pair.finish()
