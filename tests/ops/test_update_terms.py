"""Terms of weight updates: the numbers that the kernels use, to the last bit.

Each update is done once more here, from its terms: multiplications and additions that round where
the kernel's do must give the kernel's weights.
"""

import ctypes
import ctypes.util
import math

import numpy as np
import pytest
import torch

from popsim_torch import optim
from popsim_torch.optim.planning import plan_updates
from tests.ops.test_grouped_updates import CLIPPED, SMALL, STEPS
from tests.ops.update_device import CASES, Device, some_weight

_libm = ctypes.CDLL(ctypes.util.find_library("m"))
_libm.fmaf.argtypes = [ctypes.c_float] * 3
_libm.fmaf.restype = ctypes.c_float

MAX_NORM = 0.5
OPTIONS = {
    "clipped nesterov": lambda p: optim.SGD(
        p, lr=0.1, momentum=0.9, weight_decay=0.2, nesterov=True, max_grad_norm=MAX_NORM
    ),
    "clipped combined nesterov": lambda p: optim.SGD(
        p,
        lr=0.1,
        momentum=0.9,
        nesterov=True,
        loss_scaling=3.0,
        use_combined_accum=True,
        max_grad_norm=MAX_NORM,
    ),
    "clipped AdamW": lambda p: optim.AdamW(p, lr=0.1, weight_decay=0.2, max_grad_norm=MAX_NORM),
    "LAMB with decay, uncorrected": lambda p: optim.LAMB(
        p, lr=0.1, weight_decay=0.2, bias_correction=False, max_weight_norm=3.0
    ),
    "RMSprop of TensorFlow": lambda p: optim.RMSprop(p, lr=0.07, eps=1e-3, use_tf_variant=True),
    "RMSprop of TensorFlow with momentum": lambda p: optim.RMSprop(
        p, lr=0.07, eps=1e-3, momentum=0.9, centered=True, use_tf_variant=True
    ),
    "torch Adam": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.9), weight_decay=0.2),
    "torch AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2),
    "torch RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, weight_decay=0.2),
    "torch RMSprop centered with momentum": lambda p: torch.optim.RMSprop(
        p, lr=0.01, momentum=0.9, centered=True, eps=1e-3
    ),
    "torch nesterov": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, weight_decay=0.2, nesterov=True
    ),
    "Adam of half states": lambda p: optim.Adam(
        p,
        lr=0.1,
        loss_scaling=8.0,
        accum_type=torch.float16,
        first_order_momentum_accum_type=torch.float16,
        second_order_momentum_accum_type=torch.float32,
    ),
    "Adam clipped and scaled": lambda p: optim.Adam(
        p, lr=0.1, loss_scaling=3.0, max_grad_norm=MAX_NORM
    ),
    "AdamW scaled": lambda p: optim.AdamW(p, lr=0.1, weight_decay=0.2, loss_scaling=3.0),
    "AdamW uncorrected": lambda p: optim.AdamW(p, lr=0.1, bias_correction=False),
    "LAMB of half accumulators": lambda p: optim.LAMB(
        p, lr=0.1, accum_type=torch.float16, first_order_momentum_accum_type=torch.float16
    ),
    "RMSprop with momentum, scaled": lambda p: optim.RMSprop(
        p, lr=0.1, momentum=0.9, loss_scaling=3.0
    ),
    "RMSprop of half accumulators": lambda p: optim.RMSprop(
        p, lr=0.1, centered=True, eps=1e-3, accum_type=torch.float16
    ),
    "nesterov of half velocities": lambda p: optim.SGD(
        p,
        lr=0.1,
        momentum=0.9,
        nesterov=True,
        loss_scaling=3.0,
        use_combined_accum=False,
        accum_type=torch.float16,
        velocity_accum_type=torch.float16,
    ),
}
MAKERS = {**{name: case.ours for name, case in CASES.items()}, **CLIPPED, **OPTIONS}


def fma(a, b, c):
    """Return ``a * b + c``, rounded once."""
    a, b, c = np.broadcast_arrays(*(np.asarray(x, np.float32) for x in (a, b, c)))
    flat = [_libm.fmaf(*map(float, three)) for three in zip(a.flat, b.flat, c.flat, strict=True)]
    return torch.tensor(flat, dtype=torch.float32).reshape(a.shape)


def sum_of_squares(values):
    """Return what the kernels add up: 16 sums in each block of 512 elements."""
    total = 0.0
    for block in values.flatten().split(512):
        padded = torch.nn.functional.pad(block, (0, -len(block) % 16)).reshape(-1, 16)
        lanes = torch.zeros(16)
        for row in padded:
            lanes = fma(row, row, lanes)
        total += math.fsum(lanes.double().tolist())
    return total


class Replay:
    """The last steps of an update, on what a device had before and what it wrote."""

    def __init__(self, device, update, before):
        self.device, self.update, self.before = device, update, before
        self.attributes = update.attributes
        self.scalars = {s.kind: np.float32(s.value) for s in update.scalars}
        self.w = before[update.parameter].float()

    def term(self, position):
        return self.device.read(self.update.terms[position].name)

    def state(self, kind):
        """Return a state after the update."""
        return self.device.read(f"{kind}___{self.update.parameter}").float()

    def kept_as(self, kind, value):
        """Return a number as the state's type holds it."""
        return value.to(self.before[f"{kind}___{self.update.parameter}"].dtype).float()

    def clip(self):
        if "max_grad_norm" not in self.attributes:
            return np.float32(1)
        norm, limit = self.device.read("norm").numpy(), np.float32(self.attributes["max_grad_norm"])
        return np.float32(1) if norm <= limit else np.float32(limit / norm)

    def step(self):
        """Return the new weight."""
        return getattr(self, f"{self.update.kind}")()

    def sgd_momentum_update(self):
        v, rate = self.state("Accl"), self.scalars["scaledLearningRate2"]
        return self.nesterov(v, 0, 2) if self.attributes["nesterov"] else fma(-rate, v, self.w)

    def sgd_combined_update(self):
        v, rate = self.term(0), self.scalars["scaledLearningRate1"]
        new = self.nesterov(v, 1, 1) if self.attributes["nesterov"] else fma(-rate, v, self.w)
        kept = fma(
            self.scalars["scaledWeightDecay1"], new, self.scalars["scaledMomentum1"] * v.numpy()
        )
        assert torch.equal(self.state("Accl"), self.kept_as("Accl", kept))
        return new

    def nesterov(self, v, position, version):
        scalars = self.scalars
        gradient, step = self.term(position), self.term(position + 1)
        unscale = scalars[f"nesterovDampeningScaleFactor{version}"] * self.clip()
        assert torch.equal(gradient, unscale * self.gradient())
        scale = scalars[f"nesterovGradScaleFactor{version}"]
        rest = fma(scale * scalars["sgdWeightDecay"], self.w, scale * gradient.numpy())
        if self.before[f"Accl___{self.update.parameter}"].dtype == torch.float32:
            # The step has the velocity before it is rounded to half precision.
            assert torch.equal(step, fma(scalars["sgdMomentum"], v, rest))
        return fma(-scalars[f"scaledLearningRate{version}"], step, self.w)

    def gradient(self):
        return self.before["gradient"].float()

    def adam_update(self):
        return fma(-self.scalars["learningRate"], self.term(0), self.w)

    def lamb_update(self):
        sums = sum_of_squares(self.w), sum_of_squares(self.term(0))
        for position, total in enumerate(sums, start=1):
            assert self.term(position).numpy() == np.float32(total)
        weight, term = (np.float32(math.sqrt(total)) for total in sums)
        limit = self.scalars["maxWeightNorm"]
        ratio = min(weight, limit) / term if weight and term and limit else np.float32(1)
        return fma(-self.scalars["learningRate"] * ratio, self.term(0), self.w)

    def rmsprop_update(self):
        step, rate = self.term(0), self.scalars["learningRate"]
        if self.attributes["tf_variant"]:
            step, rate = rate * step, np.float32(1)
        if self.attributes["momentum"]:
            kept = self.before[f"Accl2___{self.update.parameter}"]
            step = fma(self.scalars["adaptiveMomentum"], kept, step)
            assert torch.equal(self.state("Accl2"), self.kept_as("Accl2", step))
        return fma(-rate, step, self.w)


SHAPES = {"a": (7,), "b": (3, 343), "c": (0, 3), "d": ()}


WITH_TERMS = [name for name in MAKERS if name != "SGD"]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("make", [MAKERS[name] for name in WITH_TERMS], ids=WITH_TERMS)
def test_the_terms_make_the_weights(make, dtype, micro_batches):
    torch.manual_seed(3)
    weights = {name: some_weight(shape, dtype) for name, shape in SHAPES.items()}
    plan = plan_updates(make(weights.values()), weights, gradient_accumulation=micro_batches)
    terms = [term.name for update in plan.updates for term in update.terms]
    device = Device(plan, weights, micro_batches, grouped=True, terms=terms)
    assert device.num_grouped == len(SHAPES) - 1
    for _ in range(2):
        before = {name: device.read(name) for name in (*weights, *plan.states())}
        gradients = [torch.randn(micro_batches, *w.shape).to(dtype) for w in weights.values()]
        device.run(*gradients)
        for update, gradient in zip(plan.updates, gradients, strict=True):
            total = gradient[0]
            if update.accumulator is not None:
                total = device.read(update.accumulator.name)
            replay = Replay(device, update, {**before, "gradient": total})
            expected = replay.step().to(dtype)
            assert torch.equal(device.read(update.parameter), expected), update.parameter


def trained(make, dtype, *, terms=(), grouped=True):
    """Return the weights and states after some updates, terms on the way or not."""
    torch.manual_seed(2)
    weights = {name: some_weight(shape, dtype) for name, shape in SMALL.items()}
    plan = plan_updates(make(weights.values()), weights, gradient_accumulation=2)
    wanted = [t.name for u in plan.updates for t in u.terms if terms(t.name)] if terms else ()
    device = Device(plan, weights, 2, grouped=grouped, terms=wanted)
    for _ in range(STEPS):
        device.run(*(torch.randn(2, *w.shape).to(dtype) for w in weights.values()))
    return {name: device.read(name) for name in (*weights, *plan.states(), *wanted)}


WATCHED = {
    "all": lambda name: True,
    "some parameters": lambda name: name.endswith(("___b", "b_nesterovGrad", "___g")),
    "the last terms": lambda name: "Lamb" in name or "nesterov" in name,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("terms", WATCHED.values(), ids=WATCHED)
@pytest.mark.parametrize("make", [MAKERS[name] for name in WITH_TERMS], ids=WITH_TERMS)
def test_looking_changes_no_bit(make, terms, dtype):
    alone = trained(make, dtype)
    for grouped in (False, True):
        watched = trained(make, dtype, terms=terms, grouped=grouped)
        assert all(torch.equal(watched[name], value) for name, value in alone.items())


def test_one_op_or_several_give_the_same_terms():
    make = MAKERS["LAMB"]
    one, several = (
        trained(make, torch.float32, terms=WATCHED["some parameters"], grouped=grouped)
        for grouped in (True, False)
    )
    assert one.keys() == several.keys() and "LambR2Sq___b" in one
    assert all(torch.equal(value, several[name]) for name, value in one.items())
