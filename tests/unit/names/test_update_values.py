"""Tensors inside weight updates: which optimizers have them, and their values in float64."""

import math

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import OutputMode, optim
from tests.options import make_options

LR, DECAY, MOMENTUM, DAMPENING = 0.1, 0.05, 0.9, 0.25
SCALE, VELOCITY_SCALE, CLIP, EPS = 4.0, 2.0, 0.2, 1e-3
BETAS, ALPHA = (0.8, 0.95), 0.9
UPDATES = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return poptorch.identity_loss(self.fc(x).tanh().square(), "mean")


class Rule:
    """An optimizer's update of one parameter in float64, which records its terms."""

    def __init__(self, ga, settings):
        self.ga, self.clip = ga, settings.get("max_grad_norm")
        self.betas = settings.get("betas")
        self.state = {}

    def __call__(self, weight, gradients, norm):
        """Return the new weight and the terms; ``gradients`` include the loss scale."""
        factor = min(1.0, self.clip / norm) if self.clip else 1.0
        return self.step(weight, sum(gradients) / (SCALE * self.ga) * factor, gradients)

    def kept(self, name, weight, initial=0.0):
        return self.state.setdefault(name, torch.full_like(weight, initial))


class PlainSgd(Rule):
    def step(self, w, g, gradients):
        terms = {"FinalReducedGradient___{}": sum(gradients)} if self.ga > 1 else {}
        return w * (1 - LR * DECAY) - LR * g, terms


class Nesterov(Rule):
    scale = SCALE

    def step(self, w, g, gradients):
        v = MOMENTUM * self.kept("v", w) + g + DECAY * w
        self.state["v"] = v
        step = g + DECAY * w + MOMENTUM * v
        return w - LR * step, {
            "{}_sgdInverseLossScale": g,
            "{}_nesterovGrad": self.scale * step,
        }


class CombinedNesterov(Nesterov):
    scale = VELOCITY_SCALE

    def step(self, w, g, gradients):
        new, terms = super().step(w, g, gradients)
        v = self.state["v"]
        kept = v - g
        so_far = [sum(gradients[: i + 1]) / (SCALE * self.ga) for i in range(self.ga)]
        return new, terms | {
            "AcclIntoReduce___{}": [VELOCITY_SCALE * (kept + added) for added in so_far],
            "AcclIntoUpdate___{}": VELOCITY_SCALE * v,
            "AcclOutOfAcclUpdate___{}": VELOCITY_SCALE * (MOMENTUM * v + DECAY * new),
        }


class Combined(Rule):
    def step(self, w, g, gradients):
        first = (1 - DAMPENING) * DECAY * w
        v = self.state.get("v", first)
        so_far = []
        for gradient in gradients:
            v = v + (1 - DAMPENING) * gradient / (SCALE * self.ga)
            so_far.append(VELOCITY_SCALE * v)
        w = w - LR * v
        self.state["v"] = MOMENTUM * v + (1 - DAMPENING) * DECAY * w
        return w, {
            "AcclIntoReduce___{}": so_far,
            "AcclIntoUpdate___{}": VELOCITY_SCALE * v,
            "AcclOutOfAcclUpdate___{}": VELOCITY_SCALE * self.state["v"],
        }


class Adam(Rule):
    decoupled, bias_correction = False, True

    def term(self, w, g):
        g = g if self.decoupled else g + DECAY * w
        m = self.betas[0] * self.kept("m", w) + (1 - self.betas[0]) * g
        v = self.betas[1] * self.kept("v", w) + (1 - self.betas[1]) * g**2
        self.state |= {"m": m, "v": v, "step": self.state.get("step", 0) + 1}
        if self.bias_correction:
            m = m / (1 - self.betas[0] ** self.state["step"])
            v = v / (1 - self.betas[1] ** self.state["step"])
        return m / (v.sqrt() + EPS) + (DECAY * w if self.decoupled else 0)

    def step(self, w, g, gradients):
        term = self.term(w, g)
        return w - LR * term, {"AdamUpdater___{}": term}


class AdamW(Adam):
    decoupled = True


class Lamb(AdamW):
    def step(self, w, g, gradients):
        term = self.term(w, g)
        terms = {
            "AdamUpdater___{}": term,
            "LambR1Sq___{}": w.square().sum(),
            "LambR2Sq___{}": term.square().sum(),
        }
        return w - LR * w.norm() / term.norm() * term, terms


class RawLamb(Lamb):
    bias_correction = False


class RmsProp(Rule):
    centered = tensorflow = False

    def step(self, w, g, gradients):
        g = g + DECAY * w
        a = ALPHA * self.kept("a", w, float(self.tensorflow)) + (1 - ALPHA) * g**2
        c = ALPHA * self.kept("c", w) + (1 - ALPHA) * g
        self.state |= {"a": a, "c": c}
        s = a - c**2 if self.centered else a
        term = g / (s + EPS).sqrt() if self.tensorflow else g / (s.sqrt() + EPS)
        return w - LR * term, {"AdaptiveUpdater___{}": term}


class Centered(RmsProp):
    centered = True


class TensorFlow(RmsProp):
    tensorflow = True


COMMON = {"lr": LR, "weight_decay": DECAY, "loss_scaling": SCALE}
SGD = COMMON | {"momentum": MOMENTUM}
COMBINED = SGD | {"use_combined_accum": True, "velocity_scaling": VELOCITY_SCALE}
ADAM = COMMON | {"betas": BETAS, "eps": EPS}
RMSPROP = COMMON | {"alpha": ALPHA, "eps": EPS}
CLIPPED = {"max_grad_norm": CLIP}

CASES = {
    "SGD": (optim.SGD, COMMON, PlainSgd),
    "Nesterov": (optim.SGD, SGD | {"nesterov": True}, Nesterov),
    "Nesterov, clipped": (optim.SGD, SGD | CLIPPED | {"nesterov": True}, Nesterov),
    "combined": (optim.SGD, COMBINED | {"dampening": DAMPENING}, Combined),
    "combined Nesterov": (optim.SGD, COMBINED | {"nesterov": True}, CombinedNesterov),
    "Adam": (optim.Adam, ADAM, Adam),
    "Adam, beta 0": (optim.Adam, ADAM | {"betas": (0.0, BETAS[1])}, Adam),
    "AdamW": (optim.AdamW, ADAM, AdamW),
    "AdamW, clipped": (optim.AdamW, ADAM | CLIPPED, AdamW),
    "LAMB": (optim.LAMB, ADAM, Lamb),
    "LAMB, moments as they are": (optim.LAMB, ADAM | {"bias_correction": False}, RawLamb),
    "RMSprop": (optim.RMSprop, RMSPROP, RmsProp),
    "RMSprop, centered": (optim.RMSprop, RMSPROP | {"centered": True}, Centered),
    "RMSprop, TensorFlow's": (optim.RMSprop, RMSPROP | {"use_tf_variant": True}, TensorFlow),
}


def reference(rule_of, settings, ga, data):
    """Return the weights after training, and per micro-batch the value of each term by name."""
    torch.manual_seed(2)
    net = Net().double()
    rules = {name: rule_of(ga, settings) for name, _ in net.named_parameters()}
    found = {}
    for update in data.double().chunk(UPDATES):
        gradients = {name: [] for name in rules}
        for batch in update.chunk(ga):
            loss = net(batch)
            for name, g in zip(
                rules, torch.autograd.grad(SCALE * loss, net.parameters()), strict=True
            ):
                gradients[name].append(g)
        total = [sum(g) / (SCALE * ga) for g in gradients.values()]
        norm = math.sqrt(sum(float(g.square().sum()) for g in total))
        for name, parameter in net.named_parameters():
            with torch.no_grad():
                new, terms = rules[name](parameter.detach().clone(), gradients[name], norm)
                parameter.copy_(new)
            for term, value in terms.items():
                values = value if isinstance(value, list) else [value] * ga
                found.setdefault(term.format(name), []).extend(values)
        if "max_grad_norm" in settings:
            found.setdefault("GlobalNorm___0", []).extend([torch.tensor(norm).double()] * ga)
    return net, found


OF_UPDATES = (
    *("Final", "AcclI", "AcclO", "Adam", "Adaptive", "Lamb", "GlobalNorm"),
    *("fc.weight_", "fc.bias_"),
)


@pytest.mark.parametrize(
    "case, ga",
    [*((case, 3) for case in CASES), *((case, 1) for case in ("SGD", "combined", "Adam"))],
)
def test_terms_of_updates(case, ga):
    make, settings, rule_of = CASES[case]
    torch.manual_seed(1)
    data = torch.randn(UPDATES * ga * 5, 4)
    net, expected = reference(rule_of, settings, ga, data)
    plain, unwatched = trained_on(make, settings, make_options(UPDATES, ga), data)
    listed = unwatched.getTensorNames()
    assert {name for name in listed if name.startswith(OF_UPDATES)} == set(expected)

    options = make_options(UPDATES, ga)
    for name in expected:
        for mode in (OutputMode.All, OutputMode.Final, OutputMode.Sum):
            options.anchorTensor(f"{mode.name} {name}", name, mode)
    watched, model = trained_on(make, settings, options, data)
    for name, values in expected.items():
        close = {"rtol": 2e-4, "atol": 2e-6}
        every = torch.cat([value if value.dim() else value[None] for value in values])
        for mode, value in (("All", every), ("Final", values[-1]), ("Sum", sum(values))):
            found = model.getAnchoredTensor(f"{mode} {name}")
            torch.testing.assert_close(found.double(), value, **close)
    for looked_at, alone, right in zip(
        watched.parameters(), plain.parameters(), net.parameters(), strict=True
    ):
        assert torch.equal(looked_at, alone)
        torch.testing.assert_close(alone.double(), right, rtol=1e-4, atol=1e-6)


def test_the_last_gradient_makes_the_velocity_that_the_update_takes():
    make, settings, _ = CASES["combined Nesterov"]
    options = make_options(UPDATES, 3)
    for name in ("AcclIntoReduce___fc.weight", "AcclIntoUpdate___fc.weight"):
        options.anchorTensor(name, name, OutputMode.All)
    torch.manual_seed(1)
    _, model = trained_on(make, settings, options, torch.randn(UPDATES * 3 * 5, 4))
    after, taken = (
        model.getAnchoredTensor(name).reshape(UPDATES, 3, 3, 4) for name in options.anchored_tensors
    )
    assert torch.equal(after[:, -1], taken[:, -1])
    assert not torch.equal(after[:, 0], taken[:, 0])


def trained_on(make, settings, options, data):
    torch.manual_seed(2)
    net = Net()
    model = poptorch.trainingModel(net, options, make(net.parameters(), **settings))
    model(data)
    model.copyWeightsToHost()
    return net, model
