"""Transforms of ``torch.func`` and gradients that forward itself computes."""

import copy

import pytest
import torch
from torch import func, nn
from torch.autograd import functional as autograd_functional
from torch.nn import functional as F

import popsim_torch as poptorch
from tests.parity.compare import assert_close, quiet_options
from tests.parity.functions import TOLERANCE, compare_with_eager, in_both

# Warnings of torch: rules of forward-mode differentiation, and what linearize does.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),
]


def cubes(x):
    return (x**3).sum()


def wave(x):
    return x.sin() * 2


def layer_loss(model, parameters, row):
    return func.functional_call(model.fc, parameters, (row,)).square().sum()


def parameters_of(model):
    return dict(model.fc.named_parameters())


def gradients_of_samples(model, x):
    """Gradients of each sample, the textbook use of ``torch.func``."""

    def loss(parameters, row):
        return layer_loss(model, parameters, row)

    per_sample = torch.vmap(func.grad(loss), in_dims=(None, 0))(parameters_of(model), x)
    return per_sample["weight"], per_sample["bias"]


def step_inside(model, x):
    """One step of SGD within forward, as meta learning does."""
    gradients = func.grad(lambda p: F.mse_loss(func.functional_call(model.fc, p, (x,)), x[:, :3]))
    parameters = parameters_of(model)
    moved = {n: parameters[n] - 0.1 * g for n, g in gradients(parameters).items()}
    return func.functional_call(model.fc, moved, (x,))


def ensemble(model, x):
    """Several sets of weights in one call."""
    stacked = {n: torch.stack([p, 2 * p, -p]) for n, p in parameters_of(model).items()}
    return torch.vmap(func.functional_call, (None, 0, None))(model.fc, stacked, (x,))


class Sine(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient * ctx.saved_tensors[0].cos()


TRANSFORMS = {
    "vmap": lambda m, x: torch.vmap(lambda row: row * 2 + row.sum())(x),
    "vmap of a layer": lambda m, x: torch.vmap(m.fc)(x),
    "vmap of vmap": lambda m, x: torch.vmap(lambda a: torch.vmap(lambda b: a * b.sum())(x))(x),
    "vmap over columns": lambda m, x: torch.vmap(lambda c: c.cumsum(0), 1, 1)(x),
    "vmap in chunks": lambda m, x: torch.vmap(torch.square, chunk_size=1)(x),
    "vmap with constants": lambda m, x: torch.vmap(
        lambda row: row * m.host + torch.tensor([1.0, 2, 3, 4]) + torch.ones(4)
    )(x),
    "vmap of host tensors": lambda m, x: torch.vmap(torch.square)(m.host) + x,
    "vmap of softmax": lambda m, x: torch.vmap(lambda row: m.fc(row).softmax(0))(x),
    "vmap of attention": lambda m, x: torch.vmap(
        lambda a: F.scaled_dot_product_attention(a, a, a), randomness="error"
    )(x.view(1, 2, 4)),
    "grad": lambda m, x: func.grad(cubes)(x),
    "grad by weight": lambda m, x: func.grad(lambda w: (x @ w.t()).square().sum())(m.fc.weight),
    "grad with constants": lambda m, x: func.grad(
        lambda y: (y * m.host * (m.host * 2).sum() + torch.tensor([1.0, 2, 3, 4])).sum()
    )(x),
    "grad of host tensors": lambda m, x: func.grad(cubes)(m.host) * x,
    "grad_and_value": lambda m, x: func.grad_and_value(cubes)(m.fc(x)),
    "grad of grad": lambda m, x: func.grad(lambda y: func.grad(cubes)(y).sum())(m.fc(x)),
    "vjp": lambda m, x: func.vjp(wave, m.fc(x))[1](torch.ones(2, 3))[0],
    "jvp": lambda m, x: func.jvp(wave, (m.fc(x),), (torch.ones(2, 3),)),
    "jacfwd": lambda m, x: func.jacfwd(wave)(m.fc(x)),
    "jacrev": lambda m, x: func.jacrev(wave)(m.fc(x)),
    "hessian": lambda m, x: func.hessian(cubes)(m.fc(x)),
    "linearize": lambda m, x: func.linearize(wave, m.fc(x))[1](torch.ones(2, 3)),
    "functionalize": lambda m, x: func.functionalize(lambda y: y.clone().add_(1))(m.fc(x)),
    "functional_call": lambda m, x: func.functional_call(
        m.fc, {n: 2 * p for n, p in parameters_of(m).items()}, (x,)
    ),
    "gradients of samples": gradients_of_samples,
    "a step inside": step_inside,
    "an ensemble": ensemble,
    "vmap of a Function": lambda m, x: torch.vmap(Sine.apply)(m.fc(x)),
    "grad of a Function": lambda m, x: func.grad(lambda y: Sine.apply(y).sum())(m.fc(x)),
    "autograd jacobian": lambda m, x: autograd_functional.jacobian(wave, x),
    "autograd hessian": lambda m, x: autograd_functional.hessian(cubes, x),
    "autograd jacobian in forward mode": lambda m, x: autograd_functional.jacobian(
        lambda y, z: (m.fc(y).tanh(), y * z), (x, 2 * x), strategy="forward-mode", vectorize=True
    ),
    "autograd hessian in forward mode": lambda m, x: autograd_functional.hessian(
        lambda y: cubes(m.fc(y)), x, outer_jacobian_strategy="forward-mode", vectorize=True
    ),
    "autograd vjp": lambda m, x: autograd_functional.vjp(wave, x, torch.ones(2, 4)),
    "autograd jvp": lambda m, x: autograd_functional.jvp(wave, x, torch.ones(2, 4)),
    "autograd hvp": lambda m, x: autograd_functional.hvp(cubes, x, torch.ones(2, 4)),
    "autograd vhp": lambda m, x: autograd_functional.vhp(cubes, x, torch.ones(2, 4)),
}


@in_both(TRANSFORMS)
def test_transform(function, kind):
    compare_with_eager(function, kind)


def differentiated(function):
    """Return a function that runs another one where gradients are recorded."""

    def run(model, x):
        with torch.enable_grad():
            return function(model, x)

    return run


def accumulated(model, x):
    y = x.detach().clone().requires_grad_()
    (model.fc(y) ** 3).sum().backward(inputs=[y])
    return y.grad


def grad_by(model, x, tensor, **settings):
    return torch.autograd.grad(model.fc(tensor).square().sum(), settings.pop("by"), **settings)[0]


GRADIENTS = {
    "by weight": lambda m, x: grad_by(m, x, x, by=m.fc.weight),
    "by weight, differentiable": lambda m, x: grad_by(m, x, x, by=m.fc.weight, create_graph=True),
    "by input": lambda m, x: (lambda y: grad_by(m, x, y, by=y))(x.detach().requires_grad_()),
    "by input, differentiable": lambda m, x: (lambda y: grad_by(m, x, y, by=y, create_graph=True))(
        x.detach().requires_grad_()
    ),
    "backward": accumulated,
}


@in_both({name: differentiated(function) for name, function in GRADIENTS.items()})
def test_gradients_in_forward(function, kind):
    compare_with_eager(function, kind)


def test_dropout_under_vmap_draws_for_each_row():
    class Drops(nn.Module):
        def forward(self, x):
            dropped = torch.vmap(F.dropout, randomness="different")(x)
            return dropped, poptorch.identity_loss((dropped * self.w).sum(), "none")

        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

    model = Drops()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.0)
    dropped, _ = poptorch.trainingModel(model, quiet_options(), optimizer)(torch.ones(64, 64))
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(dropped[0], dropped[1])


def test_gradients_of_tensors_inside_of_a_transform_have_names():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x):
            out = torch.vmap(lambda row: torch.tanh(self.fc(row)))(x)
            return out, poptorch.identity_loss(out.sum(), "none")

    options = quiet_options()
    options.anchorTensor("gradient", "Gradient___Tanh:0")
    model = Net()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.0)
    device = poptorch.trainingModel(model, options, optimizer)
    device(torch.rand(5, 4))
    assert torch.equal(device.getAnchoredTensor("gradient"), torch.ones(5, 3))


@pytest.mark.parametrize("transform", [torch.vmap, func.grad], ids=["vmap", "grad"])
def test_host_tensors_of_a_transform_meet_the_device(transform):
    class Mixes(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.arange(4.0)

        def forward(self, x):
            return transform(lambda row: (row * x).sum())(self.table)

    with pytest.raises(poptorch.Error, match=r"test_transforms.py:\d+ .*before the transform"):
        poptorch.inferenceModel(Mixes(), quiet_options())(torch.ones(4))


def test_a_loss_that_forward_differentiates_is_not_the_one_to_train_on():
    class Learner(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x, y):
            inner = F.cross_entropy(self.fc(x), y)
            gradient = torch.autograd.grad(inner, self.fc.weight, create_graph=True)[0]
            moved = F.linear(x, self.fc.weight - 0.5 * gradient)
            return moved, F.cross_entropy(moved, y)

    x, y = torch.rand(6, 4), torch.randint(0, 3, (6,))
    model = Learner()
    twin = copy.deepcopy(model)
    options = quiet_options()
    options.anchorTensor("gradient", "Gradient___fc.weight")
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.0)
    device = poptorch.trainingModel(model, options, optimizer)
    moved, loss = device(x, y)
    eager_moved, eager_loss = twin(x, y)
    eager_loss.backward()
    assert_close(moved, eager_moved, TOLERANCE)
    assert_close(loss, eager_loss, TOLERANCE)
    assert_close(device.getAnchoredTensor("gradient"), twin.fc.weight.grad, TOLERANCE)
