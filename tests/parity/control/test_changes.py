"""Changes in place inside of bodies: of arguments, of tensors from outside, of buffers."""

import pytest
import torch

import popsim_torch as poptorch
from tests.parity.control.flow import (
    check_inference,
    check_training,
    cond,
    for_loop,
    sample,
)


def arguments(net, x):
    h = net.fc(x)

    def body(y):
        y += 1
        y *= net.w
        return y

    return for_loop(3, body, [h])[0], h


def views_of_arguments(net, x):
    h = net.fc(x)

    def body(y):
        y[0].mul_(2)
        y[:, 1] = net.w.sum()
        y.t()[2].add_(y[:, 0].detach())
        return y

    return for_loop(3, body, [h])[0], h


def one_tensor_as_two_arguments(net, x):
    h = net.fc(x)

    def body(a, b):
        a.mul_(2)
        b.add_(a)
        return a, b

    return for_loop(2, body, [h, h])


def tensors_from_outside(net, x):
    """The change ends with the iteration, and the gradient of ``h`` outside knows nothing of it."""
    h = net.fc(x)

    def body(y):
        twice = h.mul_(2) if poptorch.isRunningOnIpu() else h * 2
        return y + twice * net.w + (h if poptorch.isRunningOnIpu() else twice)

    return for_loop(2, body, [x])[0], h


def tensors_from_outside_without_gradient(net, x):
    total = torch.zeros(4)

    def body(y):
        new = total.add_(y.sum()) if poptorch.isRunningOnIpu() else total + y.sum()
        return y * net.w + new

    return for_loop(2, body, [x])[0], total + 1


def between_nested_loops(net, x):
    def body(y):
        z = y * 1.0
        z[0] = net.w
        (z,) = for_loop(2, lambda a: torch.sin(a * net.w), [z])
        z = z * 1.0
        z[1] = 0.5
        z[2].mul_(2)
        return z

    return for_loop(2, body, [x])


def buffers(net, x):
    def body(y):
        net.counter += 1
        net.shift.mul_(0.9)
        net.shift[1] += 1
        return y * net.w + (net.counter * 1).detach() + net.shift.clone()

    return for_loop(3, body, [net.fc(x)])[0], net.counter * 1, net.shift * 1


def buffers_in_nested_loops(net, x):
    def inner(y):
        net.counter.add_(1)
        return y * net.w

    (y,) = for_loop(2, lambda y: for_loop(3, inner, [y])[0], [x])
    return y, net.counter * 1


def buffers_of_values(net, x):
    def body(y):
        y = y * net.w + net.shift
        with torch.no_grad():
            net.shift.copy_(y[0] * 0.5)
        return y

    return for_loop(3, body, [x])[0], net.shift * 1


def buffers_in_branches(net, x):
    def first(a):
        a.mul_(2)
        net.counter.add_(1)
        return a * net.w

    def second(a):
        a[0].zero_()
        net.shift.mul_(0.5)
        return a

    h = net.fc(x)
    (y,) = cond(h.sum() > 0, first, [h], second, [h])
    (z,) = cond(h.sum() <= 0, first, [h], second, [h])
    return y, z, h, net.counter * 1, net.shift * 1


def running_statistics(net, x):
    return for_loop(3, lambda y: torch.tanh(net.norm(y)), [net.fc(x)])


FUNCTIONS = [
    arguments,
    views_of_arguments,
    one_tensor_as_two_arguments,
    tensors_from_outside,
    tensors_from_outside_without_gradient,
    between_nested_loops,
    buffers,
    buffers_in_nested_loops,
    buffers_of_values,
    buffers_in_branches,
    running_statistics,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_training(function):
    check_training(function, sample())


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_inference(function):
    check_inference(function, sample())


def test_a_view_of_what_is_changed_is_refused():
    def function(net, x):
        h = net.fc(x)
        row = h[0]

        def body(y):
            h.mul_(2)
            return y + row

        return for_loop(2, body, [x])

    with pytest.raises(poptorch.Error, match="reads another view"):
        check_inference(function, sample())
