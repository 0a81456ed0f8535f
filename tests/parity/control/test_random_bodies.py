"""Loops and branches that hypothesis makes up, up to three deep, against eager PyTorch.

A body is a list of steps on its arguments and on all tensors that it can see from outside; some of
the steps are loops and branches with bodies of their own.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.parity.compare import Loop
from tests.parity.control.flow import check_inference, check_training, cond, for_loop, sample

UNARY = [
    torch.tanh,
    torch.sin,
    lambda x: x * 0.5,
    lambda x: torch.softmax(x, -1),
    lambda x: x.t().contiguous(),
    lambda x: x.t(),
    lambda x: x[:1].expand(4, 4),
    lambda x: x.detach() * 0.5 + x * 0.25,
    lambda x: x.flip(0),
    lambda x: x - x.mean(0),
    lambda x: torch.cat([x[2:], x[:2]]),
    lambda x: x.half().to(x.dtype) * 0.5 + x * 0.5,
]
BINARY = [
    lambda a, b: a + b,
    lambda a, b: torch.tanh(a) * torch.tanh(b),
    lambda a, b: torch.tanh(a @ b),
    lambda a, b: torch.where(a > b + 0.137, a, b),
    lambda a, b: torch.lerp(a, b, 0.3),
]
# Changes of a tensor that a body owns.
CHANGES = [
    lambda y, b: y.mul_(0.5),
    lambda y, b: y[0].copy_(b[1]),
    lambda y, b: y.t()[1].add_(b.mean()),
    lambda y, b: y.__setitem__((slice(None), 2), b.sum() * 0.1),
]
MODULES = [
    lambda net, x: net.fc(x),
    lambda net, x: x * net.w,
    lambda net, x: net.layer_norm(x),
    lambda net, x: x + net.shift * net.frozen,
    lambda net, x: torch.tanh(net.fc(x)) * net.fc.bias,
]


@dataclass(frozen=True)
class Step:
    """A step: what it does, and to which of the tensors there are, counted from the newest."""

    kind: str
    choice: int
    a: int
    b: int
    bodies: tuple = ()

    def apply(self, net, tensors):
        a, b = (tensors[-1 - i % len(tensors)] for i in (self.a, self.b))
        if self.kind == "unary":
            results = [UNARY[self.choice % len(UNARY)](a)]
        elif self.kind == "binary":
            results = [BINARY[self.choice % len(BINARY)](a, b)]
        elif self.kind == "module":
            results = [MODULES[self.choice % len(MODULES)](net, a)]
        elif self.kind == "change":
            results = [a * 1.0]
            CHANGES[self.choice % len(CHANGES)](results[0], b)
        elif self.kind == "loop":
            body = self.bodies[0].function(net, tensors)
            results = for_loop(self.choice % 4, body, [a, b])
        else:
            first, second = (body.function(net, tensors) for body in self.bodies)
            flag = (a - 0.137).mean() * (1 if self.choice % 2 else -1) > 0
            results = cond(flag, first, [a, b], second, [b, a])
        tensors += results


@dataclass(frozen=True)
class Body:
    """The steps of a body, and which of its tensors it returns."""

    steps: tuple[Step, ...]
    returned: tuple[int, int]

    def function(self, net, outside):
        """Return the body: a function of two tensors, which sees those outside."""

        def call(*arguments):
            tensors = [*outside, *arguments]
            for step in self.steps:
                step.apply(net, tensors)
            return [tensors[-1 - i % len(tensors)] for i in self.returned]

        return call


numbers = st.integers(0, 20)
simple = st.builds(
    Step, st.sampled_from(["unary", "binary", "module", "change"]), numbers, numbers, numbers
)


def bodies(depth):
    steps = simple
    if depth:
        inner = bodies(depth - 1)
        steps = st.one_of(
            simple,
            st.builds(Step, st.just("loop"), numbers, numbers, numbers, st.tuples(inner)),
            st.builds(Step, st.just("branch"), numbers, numbers, numbers, st.tuples(inner, inner)),
        )
    return st.builds(
        Body, st.lists(steps, min_size=1, max_size=3).map(tuple), st.tuples(numbers, numbers)
    )


@dataclass(frozen=True)
class Recipe:
    """A model: steps around a loop, and how often a call runs it."""

    before: tuple[Step, ...]
    body: Body
    count: int
    seed: int
    loop: Loop

    def __call__(self, net, x):
        tensors = [x.tanh(), net.fc(x)]
        for step in self.before:
            step.apply(net, tensors)
        results = for_loop(self.count, self.body.function(net, tensors), tensors[-2:])
        total = sum(tensors) * net.w  # what bodies read is used outside, too
        return *(torch.tanh(result) for result in results), torch.tanh(total)


recipes = st.builds(
    Recipe,
    st.lists(simple, max_size=2).map(tuple),
    bodies(2),
    st.integers(0, 3),
    st.integers(0, 1000),
    st.sampled_from([Loop(), Loop(2, 1), Loop(1, 2)]),
)


def check(recipe):
    x = sample(4 * recipe.loop.micro_batches, 4, seed=recipe.seed)
    check_training(recipe, x, recipe.loop, optimizer=lambda p: torch.optim.SGD(p, lr=0.05), steps=2)
    check_inference(recipe, x[:4])


COMMON = {
    "deadline": None,
    "database": None,
    "report_multiple_bugs": False,
    "phases": (Phase.generate, Phase.shrink),
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much],
}


@settings(max_examples=5, derandomize=True, **COMMON)
@given(recipes)
def test_random_bodies(recipe):
    check(recipe)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=500, print_blob=True, **COMMON)
@given(recipes)
def test_many_random_bodies(recipe):
    check(recipe)
