"""Derivatives in forward that are trained on: gradient penalties, torch.func, checkpoints."""

import warnings

import pytest
import torch
from torch import func, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.parity.user_rules import compare_training

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),
]


def penalty(layers):
    """WGAN-GP: the norm of the gradient with respect to the input."""

    def run(m, x):
        x = x.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(layers(m, x).sum(), x, create_graph=True)
        return (slope.norm(2, dim=1) - 1) ** 2

    return run


def r1(m, x):
    x = x.requires_grad_()
    score = m.last(m.fc(x).tanh()).sum(1)
    (slope,) = torch.autograd.grad(
        score, x, grad_outputs=torch.ones(5), create_graph=True, retain_graph=True
    )
    return score, slope.square().sum(1)


def hessian_vector(m, x):
    y = m.scale * 1
    (slope,) = torch.autograd.grad((m.fc(x).tanh() * y**3).sum(), y, create_graph=True)
    (product,) = torch.autograd.grad(slope, y, torch.ones(4), create_graph=True)
    return product


def third(m, x):
    y = m.fc(x)
    value = (y**4).sum()
    for _ in range(3):
        (y_slope,) = torch.autograd.grad(value, y, create_graph=True)
        value = y_slope.sum()
    return y_slope * m.scale


def laplacian(m, x):
    """A physics-informed loss: second derivatives by each coordinate."""
    x = x.clone().requires_grad_()
    u = m.last(m.fc(x).tanh()).sum(1, keepdim=True)
    (slope,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
    total = 0
    for i in range(4):
        total = total + torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i]
    return total + u[:, 0]


def maml(m, x):
    """A step inside, through which the outer gradient goes."""
    inner = F.mse_loss(m.fc(x), x)
    slopes = torch.autograd.grad(inner, [m.fc.weight, m.fc.bias], create_graph=True)
    weight, bias = m.fc.weight - 0.1 * slopes[0], m.fc.bias - 0.1 * slopes[1]
    return F.linear(x, weight, bias)


def first_order_maml(m, x):
    slopes = torch.autograd.grad(F.mse_loss(m.fc(x), x), [m.fc.weight])
    return F.linear(x, m.fc.weight - 0.1 * slopes[0], m.fc.bias)


def unused(m, x):
    y, z = m.fc(x), m.scale * 1
    slopes = torch.autograd.grad(y.square().sum(), [y, z], allow_unused=True, create_graph=True)
    assert slopes[1] is None
    return slopes[0] * m.scale


def materialised(m, x):
    y, z = m.fc(x), m.scale * 1
    slopes = torch.autograd.grad(y.square().sum(), [y, z], materialize_grads=True)
    return slopes[0] * m.scale + slopes[1]


def batched(m, x):
    y = m.fc(x)
    z = y.tanh()
    (rows,) = torch.autograd.grad(
        z, y, torch.eye(20).reshape(20, 5, 4), is_grads_batched=True, create_graph=True
    )
    return rows.sum(0) * m.scale


def balanced(m, x):
    """Weights of two losses from the norms of their gradients."""
    shared = m.fc(x).tanh()
    one, two = m.last(shared).square().mean(), (shared * m.scale).square().mean()
    norms = [
        torch.autograd.grad(loss, m.fc.weight, retain_graph=True)[0].norm() for loss in (one, two)
    ]
    return one / norms[0], two / norms[1]


def inputs_of_backward(m, x):
    y = m.fc(x).detach().requires_grad_()
    (y * m.scale).square().sum().backward(inputs=[y])
    return m.fc(x) * y.grad


def energy(m, x):
    """A force field: forces are the derivative of a network's energy."""
    position = x.clone().requires_grad_()
    distances = (position[:, None] - position[None]).square().sum(-1).add(1e-3).sqrt()
    value = m.last(m.fc(distances[:, :4]).tanh()).sum()
    (forces,) = torch.autograd.grad(-value, position, create_graph=True)
    return value, forces


def sam_like(m, x):
    """The loss at the weights moved along their gradient."""
    (slope,) = torch.autograd.grad(m.fc(x).square().mean(), m.fc.weight)
    moved = m.fc.weight + 0.05 * slope / (slope.norm() + 1e-12)
    return F.linear(x, moved)


DOUBLE_BACKWARD = {
    "penalty of a perceptron": penalty(lambda m, x: m.last(m.fc(x).tanh())),
    "penalty of softplus": penalty(lambda m, x: m.last(F.softplus(m.fc(x)))),
    "penalty of gelu and layer norm": penalty(
        lambda m, x: F.layer_norm(F.gelu(m.fc(x)), (4,))[:, 0]
    ),
    "penalty of attention": penalty(
        lambda m, x: F.scaled_dot_product_attention(*[m.fc(x)[None]] * 3)
    ),
    "penalty of log_softmax": penalty(lambda m, x: m.fc(x).log_softmax(1)[:, 0]),
    "penalty of cross entropy": penalty(
        lambda m, x: F.cross_entropy(m.fc(x), torch.tensor([0, 1, 2, 3, 0]))
    ),
    "penalty of a convolution": penalty(
        lambda m, x: F.conv1d(x[:, None], m.fc.weight[:, None, :3]).tanh()
    ),
    "penalty of a pool": penalty(lambda m, x: F.max_pool1d(m.fc(x)[:, None] ** 2, 2)),
    "penalty of batch norm": penalty(
        lambda m, x: F.batch_norm(m.fc(x), None, None, m.scale, training=True).tanh()
    ),
    "penalty of group norm": penalty(lambda m, x: F.group_norm(m.fc(x), 1, m.scale).tanh()),
    "penalty of a bilinear": penalty(lambda m, x: torch.einsum("bi,ij,bj->b", x, m.fc.weight, x)),
    "penalty of an embedding of a product": penalty(
        lambda m, x: (x @ F.embedding(torch.tensor([0, 2, 2]), m.fc.weight).t()).sigmoid()
    ),
    "penalty through a checkpoint": penalty(
        lambda m, x: checkpoint(lambda y: m.last(m.fc(y).tanh()), x, use_reentrant=False)
    ),
    "R1": r1,
    "Hessian times vector": hessian_vector,
    "third derivative": third,
    "Laplacian": laplacian,
    "MAML": maml,
    "first-order MAML": first_order_maml,
    "unused": unused,
    "materialised": materialised,
    "batched": batched,
    "balanced losses": balanced,
    "backward(inputs=)": inputs_of_backward,
    "energy": energy,
    "sharpness aware": sam_like,
}


def parameters(m):
    return dict(m.fc.named_parameters())


def call(m, weights, x):
    return func.functional_call(m.fc, weights, (x,))


def members(m):
    m.members = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


def ensemble(m, x):
    """The members stay the owners of their weights."""
    stacked = {
        name: torch.stack([dict(one.named_parameters())[name] for one in m.members])
        for name in ("weight", "bias")
    }
    return torch.vmap(lambda weights, y: func.functional_call(m.fc, weights, (y,)), (0, None))(
        stacked, x
    )


def stack_members(m):
    torch.manual_seed(1)
    weights, _ = func.stack_module_state([nn.Linear(4, 4) for _ in range(3)])
    m.stacked = nn.ParameterDict({n: nn.Parameter(w.detach().clone()) for n, w in weights.items()})


def with_buffers(m):
    m.norm = nn.BatchNorm1d(4)


def functional_batch_norm(m, x):
    """The state is a copy: the model's own statistics stay."""
    state = {n: t.clone() for n, t in (*m.norm.named_parameters(), *m.norm.named_buffers())}
    return func.functional_call(m.norm, state, (m.fc(x),)) * m.scale


def tied(m):
    m.tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    m.tied[1].weight = m.tied[0].weight


def per_sample_norms(m, x):
    def loss(weights, row):
        return call(m, weights, row).square().sum()

    grads = torch.vmap(func.grad(loss), (None, 0))(parameters(m), x)
    norms = sum(g.flatten(1).square().sum(1) for g in grads.values()).sqrt()
    return norms, (grads["weight"] / norms[:, None, None].clamp(min=1)).mean(0)


FUNC = {
    "grad": (lambda m, x: func.grad(lambda y: (m.fc(y) ** 3).sum())(x) * m.scale, None),
    "grad of grad": (
        lambda m, x: func.grad(lambda y: func.grad(lambda z: (m.fc(z) ** 3).sum())(y).sum())(x),
        None,
    ),
    "grad_and_value with aux": (
        lambda m, x: func.grad_and_value(lambda y: ((m.fc(y) ** 2).sum(), m.fc(y)), has_aux=True)(
            x
        )[1],
        None,
    ),
    "value and gradient": (
        lambda m, x: func.grad_and_value(lambda w: (F.linear(x, w) ** 2).sum())(m.fc.weight),
        None,
    ),
    "vjp": (lambda m, x: func.vjp(lambda y: m.fc(y).tanh(), x)[1](m.scale.expand(5, 4))[0], None),
    "jvp": (lambda m, x: func.jvp(lambda y: m.fc(y).tanh(), (x,), (m.scale.expand(5, 4),)), None),
    "jacrev": (
        lambda m, x: torch.vmap(func.jacrev(lambda y: m.fc(y).tanh()))(x) * m.scale,
        None,
    ),
    "jacfwd": (
        lambda m, x: torch.vmap(func.jacfwd(lambda y: m.fc(y).tanh()))(x) * m.scale,
        None,
    ),
    "hessian": (
        lambda m, x: torch.vmap(func.hessian(lambda y: m.last(m.fc(y).tanh()).sum()))(x),
        None,
    ),
    "jacfwd of jacrev": (
        lambda m, x: func.jacfwd(func.jacrev(lambda y: (m.fc(y).sin() * m.scale).sum()))(x[0]),
        None,
    ),
    "log determinant of a Jacobian": (
        lambda m, x: torch.vmap(
            lambda y: torch.linalg.slogdet(func.jacrev(lambda z: z + m.fc(z).tanh() * 0.1)(y))[1]
        )(x),
        None,
    ),
    "Hutchinson's trace": (
        lambda m, x: (
            func.jvp(lambda y: m.fc(y).tanh(), (x,), (torch.ones(5, 4),))[1] * torch.ones(5, 4)
        ).sum(1),
        None,
    ),
    "vmap": (lambda m, x: torch.vmap(lambda row: m.fc(row) * row.sum())(x), None),
    "vmap over two": (
        lambda m, x: torch.vmap(lambda a, b: a @ m.fc.weight @ b, (0, 1), 0)(x, x.t()),
        None,
    ),
    "vmap in place": (
        lambda m, x: torch.vmap(lambda row: (m.fc(row) * 1).mul_(2).add_(m.scale))(x),
        None,
    ),
    "functional_call": (
        lambda m, x: call(m, {n: p * 2 for n, p in parameters(m).items()}, x),
        None,
    ),
    "functional_call with buffers": (functional_batch_norm, with_buffers),
    "functional_call of tied weights": (
        lambda m, x: func.functional_call(m.tied, {"0.weight": m.fc.weight.tanh()}, (x,)),
        tied,
    ),
    "ensemble": (ensemble, members),
    "stack_module_state": (
        lambda m, x: torch.vmap(func.functional_call, (None, 0, None))(m.fc, dict(m.stacked), (x,)),
        stack_members,
    ),
    "gradients of samples": (per_sample_norms, None),
    "a step inside": (
        lambda m, x: call(
            m,
            {
                n: parameters(m)[n] - 0.1 * g
                for n, g in func.grad(lambda w: F.mse_loss(call(m, w, x), x))(parameters(m)).items()
            },
            x,
        ),
        None,
    ),
    "linearize": (
        lambda m, x: func.linearize(lambda y: m.fc(y).tanh(), x)[1](x * m.scale),
        None,
    ),
    "forward-mode duals": (lambda m, x: duals(m, x), None),
}


def duals(m, x):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, m.scale.expand(5, 4))
        return torch.autograd.forward_ad.unpack_dual(m.fc(dual).tanh()).tangent


def layers(m):
    m.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))


def nested(reentrant):
    def run(m, x):
        def inner(y):
            return checkpoint(m.layers[1], m.layers[0](y), use_reentrant=reentrant)

        return no_warning(lambda: checkpoint(inner, m.fc(x), use_reentrant=reentrant)) * m.scale

    return run


def mixed(m, x):
    def inner(y):
        return checkpoint(m.layers[1], m.layers[0](y), use_reentrant=True)

    return checkpoint(inner, m.fc(x), use_reentrant=False) * m.scale


def with_hooks(m, x):
    def part(y):
        z = m.layers[0](y)
        z.register_hook(lambda g: g * 0.5)
        return z * 2

    return checkpoint(part, m.fc(x), use_reentrant=False)


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 7 * ctx.saved_tensors[0]


CHECKPOINTS = {
    "reentrant": lambda m, x: checkpoint(m.layers, m.fc(x), use_reentrant=True),
    "not reentrant": lambda m, x: checkpoint(m.layers, m.fc(x), use_reentrant=False),
    "keywords": lambda m, x: checkpoint(
        lambda y, factor: m.layers(y) * factor, m.fc(x), factor=m.scale, use_reentrant=False
    ),
    "no random state": lambda m, x: checkpoint(
        m.layers, m.fc(x), use_reentrant=False, preserve_rng_state=False
    ),
    "of an input": lambda m, x: checkpoint(m.layers, x, use_reentrant=False),
    "reentrant, of an input without gradient": lambda m, x: (
        no_warning(lambda: checkpoint(m.layers, x, use_reentrant=True)) + m.fc(x)
    ),
    "sequential": lambda m, x: checkpoint_sequential(m.layers, 2, m.fc(x), use_reentrant=False),
    "sequential, reentrant": lambda m, x: checkpoint_sequential(
        m.layers, 2, m.fc(x), use_reentrant=True
    ),
    "nested": nested(False),
    "nested, reentrant": nested(True),
    "nested, mixed": mixed,
    "with hooks": with_hooks,
    "with a Function": lambda m, x: checkpoint(Cubed.apply, m.fc(x), use_reentrant=False),
    "with a Function, reentrant": lambda m, x: checkpoint(Cubed.apply, m.fc(x), use_reentrant=True),
    "detached inside": lambda m, x: checkpoint(
        lambda y: m.layers[0](y) * m.layers[1](y).detach(), m.fc(x), use_reentrant=False
    ),
    "several results": lambda m, x: checkpoint(
        lambda y: (m.layers[0](y), y * 2, None), m.fc(x), use_reentrant=False
    )[:2],
    "changed in place inside": lambda m, x: checkpoint(
        lambda y: m.layers[0][0](y).mul_(2).add_(y), m.fc(x), use_reentrant=False
    ),
}


def no_warning(call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


PROGRAMS = {name: (program, None) for name, program in DOUBLE_BACKWARD.items()}
PROGRAMS |= {f"func: {name}": pair for name, pair in FUNC.items()}
PROGRAMS |= {f"checkpoint: {name}": (program, layers) for name, program in CHECKPOINTS.items()}


@pytest.mark.parametrize(("program", "prepare"), PROGRAMS.values(), ids=PROGRAMS)
def test_it_trains_as_in_eager_pytorch(program, prepare, request):
    wide = "penalty" in request.node.name  # float32 rounds second derivatives in eager PyTorch, too
    compare_training(program, prepare, wide=wide)
