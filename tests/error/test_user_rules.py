"""Mistakes in the user's own rules: the errors read as in eager PyTorch, and say where."""

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import popsim_torch as poptorch
from tests.parity.compare import quiet_options
from tests.parity.user_rules import Net, batches, momentum, refusal


def rule(forward, backward, setup=None):
    """Return a ``torch.autograd.Function``."""
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    if setup is not None:
        methods["setup_context"] = staticmethod(setup)
    return type("Mine", (Function,), methods)


class Layer(nn.Module):
    def __init__(self, function, weight):
        super().__init__()
        self.function = function
        self.weights = [nn.Parameter(torch.ones(4))] if weight else []

    def forward(self, x):
        return self.function.apply(x, *self.weights)


def in_a_layer(function, weight=False):
    def prepare(m):
        m.quantiser = Layer(function, weight)

    return lambda m, x: m.quantiser(m.fc(x)), prepare


def plain(ctx, x):
    return x * 2


def saving(ctx, x):
    ctx.save_for_backward(x)
    return x * 2


class NoBackward(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2


def train(model):
    poptorch.trainingModel(model, quiet_options(), momentum(model))(batches()[0])


OF_THE_GRADIENT = {
    "too few": in_a_layer(rule(lambda ctx, x, w: x * w, lambda ctx, g: g), weight=True),
    "too many": in_a_layer(rule(plain, lambda ctx, g: (g, g))),
    "another shape": in_a_layer(rule(plain, lambda ctx, g: g[:2])),
    "no tensor": in_a_layer(rule(plain, lambda ctx, g: 3.0)),
    "no backward": in_a_layer(NoBackward),
}


@pytest.mark.parametrize(("program", "prepare"), OF_THE_GRADIENT.values(), ids=OF_THE_GRADIENT)
def test_a_wrong_gradient_names_the_layer(program, prepare):
    eager, ours = refusal(program, prepare)
    message, _, where = ours.partition("\n")
    assert message == eager
    assert where.startswith("This is the gradient of the call at ")
    assert "test_user_rules.py" in where
    assert where.endswith(" in the layer 'quantiser'.")


def twice(m, x):
    once = rule(saving, once_differentiable(lambda ctx, g: g * ctx.saved_tensors[0]))
    value = once.apply(m.fc(x)).square().sum()
    return torch.autograd.grad(value, m.fc.weight, create_graph=True)[0]


def hooked(hook):
    def run(m, x):
        y = m.fc(x)
        y.register_hook(hook)
        return y

    return run


def shortened(gradient):
    return gradient[:1]


def second_backward(m, x):
    y = m.fc(x).exp().sum()
    return torch.autograd.grad(y, m.fc.weight)[0] + torch.autograd.grad(y, m.fc.weight)[0]


def batched_without_rule(m, x):
    function = rule(lambda x: x * 2, lambda ctx, g: g, lambda ctx, inputs, output: None)
    return torch.vmap(function.apply)(m.fc(x))


def old_style_in_a_transform(m, x):
    function = rule(saving, lambda ctx, g: g)
    return torch.func.grad(lambda y: function.apply(y).sum())(m.fc(x))


def saved_number(ctx, x):
    ctx.save_for_backward(3, x)
    return x * 2


def dirty_leaf(ctx, x):
    ctx.mark_dirty(x)
    return x.mul_(2)


PROGRAMS = {
    "a number is saved": in_a_layer(rule(saved_number, lambda ctx, g: g)),
    "more is read than was saved": in_a_layer(rule(saving, lambda ctx, g: ctx.saved_tensors[1])),
    "an attribute that is not there": in_a_layer(rule(plain, lambda ctx, g: g * ctx.factor)),
    "a gradient for a number": (
        lambda m, x: rule(lambda ctx, x, k: x * k, lambda ctx, g: (g, g)).apply(m.fc(x), 2),
        None,
    ),
    "a leaf is marked as dirty": (
        lambda m, x: rule(dirty_leaf, lambda ctx, g: g).apply(m.scale) * m.fc(x),
        None,
    ),
    "no setup_context": in_a_layer(rule(lambda x: x * 2, lambda ctx, g: g)),
    "no vmap rule": (batched_without_rule, None),
    "a forward with a context in a transform": (old_style_in_a_transform, None),
    "differentiated twice": (twice, None),
    "a hook that returns another shape": (hooked(shortened), None),
    "a hook that returns a number": (hooked(lambda gradient: 3), None),
    "a hook without a gradient": (lambda m, x: (x.register_hook(shortened), m.fc(x))[1], None),
    "a second backward": (second_backward, None),
    "a tensor that is not used": (
        lambda m, x: torch.autograd.grad(m.fc(x).sum(), m.scale, create_graph=True)[0],
        None,
    ),
    "a gradient of several numbers": (
        lambda m, x: torch.autograd.grad(m.fc(x), m.fc.weight, create_graph=True)[0],
        None,
    ),
    "a backward hook that returns too much": (
        lambda m, x: m.last(m.fc(x)),
        lambda m: m.last.register_full_backward_hook(lambda module, i, o: (i[0], i[0])),
    ),
    "a forward hook that returns too much": (
        lambda m, x: m.last(m.fc(x)),
        lambda m: m.last.register_forward_pre_hook(lambda module, args: (args[0], args[0])),
    ),
    "in place behind a backward hook": (
        lambda m, x: m.last(m.fc(x)).add_(1),
        lambda m: m.last.register_full_backward_hook(lambda module, i, o: None),
    ),
}


@pytest.mark.parametrize(("program", "prepare"), PROGRAMS.values(), ids=PROGRAMS)
def test_it_reads_as_in_eager_pytorch(program, prepare):
    eager, ours = refusal(program, prepare)
    assert ours.split("\n")[0] == eager.split("\n")[0]


def test_a_value_that_backward_reads():
    function = rule(plain, lambda ctx, g: g * g.sum().item())
    program, prepare = in_a_layer(function)
    model = Net(program, prepare)
    with pytest.raises(poptorch.Error, match=r"reads the value of .*test_user_rules.py"):
        train(model)


def test_data_of_another_shape():
    def program(m, x):
        m.scale.data = torch.ones(2)
        return m.fc(x)

    with pytest.raises(poptorch.Error, match=r"assigns data of shape \(2,\) .* of shape \(4,\)"):
        train(Net(program))


def test_data_in_the_body_of_a_loop():
    def program(m, x):
        def body(y):
            y.data = y.data * 2
            return [y * 1]

        return poptorch.for_loop(2, body, [m.fc(x)])[0]

    with pytest.raises(poptorch.Error, match="not supported in the body of a loop"):
        train(Net(program))
