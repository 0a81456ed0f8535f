"""Gradients of loops and branches: of what they are given, and of all that they read."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import popsim_torch as poptorch
from tests.parity.compare import Loop
from tests.parity.control.flow import check_training, cond, for_loop, sample


def tensors_computed_of_each_other(net, x):
    """The body reads h, what it is computed of, and what is computed of it."""
    h = x * net.w
    g = h * net.fc.bias
    return for_loop(2, lambda a: torch.tanh(a + h * net.w + g * net.fc.bias), [x])[0], h


def the_same_in_branches(net, x):
    h = x * net.w
    g = h * net.fc.bias
    sides = lambda a: torch.tanh(a + h * net.w + g * net.fc.bias), lambda a: a * g * h
    return cond(x.sum() > 0, sides[0], [x], sides[1], [x])[0], h


def the_same_in_nested_loops(net, x):
    h = x * net.w

    def body(a):
        q = a * h
        return for_loop(2, lambda z: torch.tanh(z + h * net.w) + q * h, [a * net.w])[0]

    return for_loop(2, body, [x])[0], h


def a_loop_reads_the_result_of_another(net, x):
    (y,) = for_loop(3, lambda a: torch.tanh(net.fc(a) * net.w), [x])
    return for_loop(2, lambda a: torch.sin(a + y) * net.w, [y])[0], y


def views_from_outside(net, x):
    h = net.fc(x)
    v, t = h[0], h.t()
    return for_loop(3, lambda a: torch.tanh(a + v + h * net.w + t[:, :1].t()), [x])[0], v


def without_gradients_around(net, x):
    with torch.no_grad():
        (y,) = for_loop(3, lambda a: torch.tanh(net.fc(a)), [net.fc(x)])
    return y * net.w


def without_gradients_inside(net, x):
    def body(a):
        with torch.no_grad():
            q = torch.tanh(net.fc(a))
        return a * 0.5 + q * net.w

    return for_loop(3, body, [net.fc(x)])


def detached(net, x):
    return for_loop(
        3, lambda a, b: (a.detach() * net.w + b, b.detach() + 1), [net.fc(x), net.fc(x) * 2]
    )


class Scaled(torch.autograd.Function):
    """A product, with gradients of its own making."""

    @staticmethod
    def forward(ctx, a, w):
        ctx.save_for_backward(a, w)
        return a * w

    @staticmethod
    def backward(ctx, gradient):
        a, w = ctx.saved_tensors
        return gradient * w * 3, (gradient * torch.cos(a)).sum(0)


def functions_with_gradients_of_their_own(net, x):
    return for_loop(3, lambda a: Scaled.apply(torch.tanh(a), net.w), [net.fc(x)])


def checkpoints(net, x):
    def body(a):
        return checkpoint(lambda q: torch.tanh(net.fc(q)), a, use_reentrant=False)

    return for_loop(3, body, [x])


def reentrant_checkpoints(net, x):
    def body(a):
        return checkpoint(lambda q, w: torch.tanh(net.fc(q) * w), a, net.w, use_reentrant=True)

    return for_loop(3, body, [net.fc(x)])


def hooks(net, x):
    def body(a):
        q = a * net.w
        if q.requires_grad:
            q.register_hook(lambda gradient: gradient * 2)
        return torch.tanh(q)

    return for_loop(3, body, [net.fc(x)])


def gradients_inside(net, x):
    def body(a):
        q = a * 1.0
        z = torch.sin(q * net.w)
        (gradient,) = torch.autograd.grad(z.sum(), q, create_graph=True)
        return z + gradient * 0.1

    return for_loop(2, body, [net.fc(x)])


def gradients_around(net, x):
    q = net.fc(x)
    (y,) = for_loop(2, lambda a: torch.sin(a * net.w), [q])
    (gradient,) = torch.autograd.grad(y.sum(), q, retain_graph=True)
    return y, gradient


def transforms_inside(net, x):
    def body(a):
        a = torch.vmap(lambda row: torch.tanh(row * net.w))(a)
        return torch.func.grad(lambda q: (q**3 * net.w).sum())(a) * 0.1

    return for_loop(3, body, [net.fc(x)])


def a_loss_inside(net, x):
    def body(y, loss):
        y = torch.tanh(net.fc(y))
        return y, loss + poptorch.identity_loss((y**2).mean(), "none")

    return for_loop(2, body, [x, torch.zeros(())])[1]


FUNCTIONS = [
    tensors_computed_of_each_other,
    the_same_in_branches,
    the_same_in_nested_loops,
    a_loop_reads_the_result_of_another,
    views_from_outside,
    without_gradients_around,
    without_gradients_inside,
    detached,
    functions_with_gradients_of_their_own,
    checkpoints,
    reentrant_checkpoints,
    hooks,
    gradients_inside,
    gradients_around,
    transforms_inside,
    a_loss_inside,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_after_updates(function):
    check_training(function, sample())


@pytest.mark.parametrize(
    "function", [a_loop_reads_the_result_of_another, tensors_computed_of_each_other]
)
@pytest.mark.parametrize("loop", [Loop(2, 1), Loop(1, 2), Loop(2, 2)], ids=str)
def test_several_micro_batches(function, loop):
    check_training(function, sample(4 * loop.micro_batches, 4), loop)


def test_adam():
    check_training(
        the_same_in_branches,
        sample(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    )


def test_a_branch_that_changes_sides():
    """One executable; what the other side reads has a gradient of zero."""

    def function(net, x):
        return cond(x.sum() > 0, lambda a: torch.sin(a) * net.w, [x], lambda a: net.fc(a), [x])

    x = sample().abs()
    rows = torch.cat([x, -x, x, -x])
    check_training(
        function, rows, Loop(4, 1), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), steps=2
    )
