"""What bodies may do, against eager PyTorch: results, and weights after updates."""

import pytest
import torch
import torch.nn.functional as F

from tests.parity.control.flow import (
    check_inference,
    check_training,
    cond,
    for_loop,
    sample,
)


def swapped(net, x):
    return for_loop(3, lambda a, b: (b, torch.sin(net.fc(a))), [x, net.fc(x)])


def returned_twice(net, x):
    def body(a, b):
        c = torch.tanh(a * net.w + b)
        return c, c

    return for_loop(3, body, [x, net.fc(x)])


def returned_as_given(net, x):
    return for_loop(3, lambda a, b, c: (a, b + a, a), [net.fc(x), x, x])


def constant(net, x):
    return for_loop(2, lambda a: torch.ones(4) * 2, [torch.zeros(4)])[0] * net.w


def tensor_from_outside_returned(net, x):
    h = net.fc(x)
    return for_loop(3, lambda a, b: (h, a), [x, x])


def weight_returned(net, x):
    return for_loop(3, lambda a, b: (net.w, a + b), [x.mean(0), x.mean(0)])[1]


def views_carried(net, x):
    z = net.fc(x)

    def body(a, b, c):
        a = a.t().contiguous().t() * 0.5 + c[None]
        return a, b.roll(1, 0) + a[0, :2], c * 1.01 + b.sum()

    return for_loop(3, body, [z, z[1, ::2], net.w.expand(4)])


def transposed(net, x):
    z = net.fc(x)
    return for_loop(2, lambda a, b: (b.t(), torch.sin(a).t()), [z, z.t()])


def expanded(net, x):
    z = net.fc(x)
    shape = z.shape
    return for_loop(3, lambda a: a[:1].expand(shape) * net.w, [z[:1].expand(shape)])


def no_iteration(net, x):
    return for_loop(0, lambda y: torch.tanh(net.fc(y)), [net.fc(x)])


def one_iteration(net, x):
    return for_loop(1, lambda y: torch.tanh(net.fc(y)), [net.fc(x)])


def all_types(net, x):
    def body(a, h, i, j, b):
        flips = a.sum() > 0
        return a + h.float() * 0.1 + i, (a * 0.1).half() + h, i + b.int(), j * 2 + 1, b ^ flips

    numbers = [torch.zeros(3, 1, dtype=torch.int32)[:1], torch.ones(2, dtype=torch.int64)]
    return for_loop(3, body, [net.fc(x), x.half(), *numbers, torch.tensor(True)])


def everything_captured(net, x):
    h, c = torch.relu(net.fc(x)), torch.arange(4.0)

    def body(y):
        return torch.tanh(y * net.w + h + x + c + net.shift + net.frozen)

    return for_loop(3, body, [x * 0])[0] * h


def convolution(net, x):
    return for_loop(3, lambda y: torch.tanh(net.conv(y[:, None])[:, 0]), [net.fc(x)])


def layer_norm(net, x):
    return for_loop(3, lambda y: F.gelu(net.layer_norm(y)), [net.fc(x)])


def lstm_with_its_state(net, x):
    def body(y, h, c):
        out, (h, c) = net.lstm(y[:, None], (h, c))
        return out[:, 0], h, c

    zeros = torch.zeros(1, x.shape[0], 4)
    return for_loop(2, body, [net.fc(x), zeros, zeros])


def gru(net, x):
    return for_loop(2, lambda y: net.gru(y[None])[0][0], [x])


def attention(net, x):
    def body(y):
        return F.scaled_dot_product_attention(net.fc(y)[None], y[None], y[None] * net.w)[0]

    return for_loop(2, body, [x])


def cross_entropy_carried(net, x):
    def body(y, loss):
        loss = loss + F.cross_entropy(net.fc(y), torch.arange(x.shape[0]) % 4)
        return torch.softmax(y * net.w, -1), loss

    return for_loop(3, body, [net.fc(x), torch.zeros(())])


def ctc_loss(net, x):
    def body(y, loss):
        y = torch.tanh(net.fc(y))
        log_probs = torch.log_softmax(y[:, None, :].expand(4, 2, 4), -1)
        targets, lengths = torch.tensor([[1, 2], [2, 3]]), torch.tensor([4, 4])
        return y, loss + F.ctc_loss(log_probs, targets, lengths, torch.tensor([2, 2]))

    return for_loop(2, body, [x, torch.zeros(())])[1]


def embedding(net, x):
    def body(y, i):
        y = y + net.embedding(i % 10).sum(0)
        return y[torch.arange(x.shape[0]).flip(0)] * 0.5, i + 1

    return for_loop(3, body, [net.fc(x), torch.arange(3, dtype=torch.int32)])


def index_that_is_counted(net, x):
    def body(y, i):
        row = torch.index_select(y, 1, i)
        return y.index_add(0, i, net.w[None]) * 0.9 + row, (i + 1) % 4

    return for_loop(5, body, [net.fc(x), torch.zeros(1, dtype=torch.int64)])


def rows_written(net, x):
    def body(rows, i, y):
        rows = rows.index_copy(0, i, y.mean(0, keepdim=True))
        return rows, i + 1, torch.tanh(net.fc(y))

    return for_loop(4, body, [torch.zeros(4, 4), torch.zeros(1, dtype=torch.int64), x])


def values_known_at_compile_time(net, x):
    def body(a):
        z = torch.zeros(4)
        z[torch.arange(3)] = 1.0
        a = a + z * net.w + torch.full((4,), 0.5) + torch.eye(4)[1]
        return a + torch.linspace(0, 1, 4) + torch.tensor([1.0, 2, 3, 4]) + len(torch.arange(3))

    return for_loop(3, body, [x])


def loops_in_loops(net, x):
    def inner(a, k):
        (b,) = for_loop(2, lambda y: torch.tanh(y * net.w) + 0.1, [a + k])
        return b, k * 0.9

    def body(y):
        z, k = for_loop(3, inner, [net.fc(y), y.mean()])
        return z * 0.5 + k

    return for_loop(2, body, [x])


def branches_in_loops(net, x):
    def body(y, i):
        sides = lambda a: torch.sin(net.fc(a)), lambda a, b: a * b
        return cond(i.sum() % 2 == 0, sides[0], [y], sides[1], [y, net.w])[0], i + 1

    return for_loop(4, body, [x, torch.zeros(1, dtype=torch.int32)])


def loops_in_branches(net, x):
    def first(a):
        return for_loop(3, lambda q: torch.tanh(net.fc(q)), [a])

    def second(a, b):
        return for_loop(2, lambda q, r: (q * r, r + net.w), [a, b])[0]

    (y,) = cond(x.sum() > 0, first, [x], second, [x, net.fc(x)])
    (z,) = cond(x.sum() <= 0, first, [y], second, [y, net.fc(y)])
    return y, z


def branches_in_branches(net, x):
    def first(a):
        return cond(a.mean() > 0, lambda p: p * net.w, [a], lambda p: net.fc(p), [a])

    return cond(net.fc(x).sum() > 0, first, [x], lambda: net.layer_norm(x), [])


def condition_of_weights(net, x):
    flag = (net.w.sum() + net.fc(x).mean()).tanh() > 0.1
    return cond(flag, lambda a: a * net.w, [x], lambda a: net.fc(a), [x])


def one_function_for_both_sides(net, x):
    def side(a):
        return torch.sin(a) * net.w, a, a

    return cond(x.sum() > 100, side, [x], side, [net.fc(x)])


def number_as_an_argument(net, x):
    return cond(x.sum() > 0, lambda a, k: a * k, [x, 2.0], lambda: net.fc(x), [])


def integers_of_two_widths(net, x):
    def body(a, rows):
        return torch.sin(net.fc(a)), rows + a.argmax(0)

    y, rows = for_loop(3, body, [x, torch.zeros(4, dtype=torch.int32)])
    flag = y.sum() > 0
    (first,) = cond(flag, lambda r: r.int() + 1, [rows], lambda a: a.argmax(1), [y])
    (second,) = cond(flag, lambda a: a.argmax(1), [y], lambda r: r.int() + 1, [rows])
    return y, rows, first, second


def result_used_twice(net, x):
    (y,) = for_loop(3, lambda a: torch.tanh(net.fc(a) * net.w), [net.fc(x)])
    z = y + y
    return z * y.sum(), net.fc(z), y


FUNCTIONS = [
    swapped,
    returned_twice,
    returned_as_given,
    constant,
    tensor_from_outside_returned,
    weight_returned,
    views_carried,
    transposed,
    expanded,
    no_iteration,
    one_iteration,
    all_types,
    everything_captured,
    convolution,
    layer_norm,
    lstm_with_its_state,
    gru,
    attention,
    cross_entropy_carried,
    ctc_loss,
    embedding,
    index_that_is_counted,
    rows_written,
    values_known_at_compile_time,
    loops_in_loops,
    branches_in_loops,
    loops_in_branches,
    branches_in_branches,
    condition_of_weights,
    one_function_for_both_sides,
    number_as_an_argument,
    integers_of_two_widths,
    result_used_twice,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_training(function):
    check_training(function, sample())


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_inference(function):
    check_inference(function, -sample())


@pytest.mark.parametrize("function", [loops_in_loops, branches_in_loops, layer_norm, views_carried])
def test_half_precision(function):
    x = sample().half() * 0.5
    check_training(function, x, dtype=torch.float16)
    check_inference(function, x, dtype=torch.float16)
