"""Hooks on tensors, modules and nodes of autograd."""

import pytest
import torch
from torch import nn
from torch.nn.modules import module as global_hooks

from tests.parity.user_rules import compare_training


def halved(gradient):
    return gradient * 0.5


def prepared(register):
    """Return a program whose model gets hooks before it is trained."""
    return lambda m, x: m.last(m.fc(x).tanh()) * m.scale[:3], register


def on_a_tensor(m, x):
    y = m.fc(x)
    y.register_hook(lambda g: g * 2 + 1)
    return y * m.scale


def two_on_a_tensor(m, x):
    y = m.fc(x)
    y.register_hook(lambda g: g + 1)
    y.register_hook(halved)
    return y * m.scale


def host_tensor_in_a_hook(m, x):
    y = m.fc(x)
    mask = torch.tensor([1.0, 0, 1, 0])
    y.register_hook(lambda g: g * mask + torch.ones(4))
    return y * m.scale


def hook_changes_in_place(m, x):
    y = m.fc(x)

    def clip(g):
        g = g.clone()
        g[:, 0] = 0
        return g.clamp_(-0.5, 0.5)

    y.register_hook(clip)
    return y * m.scale


def removed_from_a_tensor(m, x):
    y = m.fc(x)
    y.register_hook(halved).remove()
    return y * m.scale


def on_a_parameter_in_forward(m, x):
    w = m.fc.weight
    handle = w.register_hook(halved)
    result = m.fc(x)
    handle.remove()
    return result


def weight_alias(m, x):
    w = m.fc.weight * 1
    w.register_hook(halved)
    return nn.functional.linear(x, w)


def retained(m, x):
    """A gradient that is kept for the user is the same tensor as eager's."""
    y = m.fc(x)
    y.retain_grad()
    z = y * m.scale
    (slope,) = torch.autograd.grad(z.square().sum(), y, create_graph=True)
    return slope


def on_a_node(m, x):
    y = m.fc(x).exp()
    y.grad_fn.register_hook(lambda given, received: (given[0] * 0.25,))
    return y * m.scale


def before_a_node(m, x):
    y = m.fc(x).exp()
    y.grad_fn.register_prehook(lambda received: (received[0] * 0.25,))
    return y * m.scale


def multi_grad(m, x):
    y, z = m.fc(x), m.scale * 2
    seen = []
    torch.autograd.graph.register_multi_grad_hook((y, z), lambda grads: seen.append(len(grads)))
    return y * z


def packed(m, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
        y = m.fc(x).tanh() * m.scale
    return y


def packed_with_loss(m, x):
    """What is unpacked differs from what was packed: the gradient follows."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 3):
        y = m.fc(x) * m.scale
    return y


def packed_half(m, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        y = (m.fc(x) * 4).round() / 4 * m.scale
    return y


def packed_on_host(m, x):
    with torch.autograd.graph.save_on_cpu():
        y = m.fc(x).tanh() * m.scale
    return y


def by_keyword(m, x):
    y = m.fc(x)
    y.register_hook(hook=lambda g: g * torch.tensor([1.0, 0, 2, 0]))
    return y


def on_a_view(m, x):
    y = m.fc(x)
    view = y[:2]
    view.register_hook(lambda g: g * 3)
    return view * 2, y


def before_and_after_a_change(m, x):
    y = m.fc(x)
    y.register_hook(lambda g: g * 3)
    y.mul_(m.scale)
    y.register_hook(lambda g: g + 1)
    return y


ON_TENSORS = {
    one.__name__: (one, None)
    for one in (
        on_a_tensor,
        two_on_a_tensor,
        host_tensor_in_a_hook,
        hook_changes_in_place,
        removed_from_a_tensor,
        weight_alias,
        retained,
        on_a_node,
        before_a_node,
        multi_grad,
        by_keyword,
        on_a_view,
        before_and_after_a_change,
        packed,
        packed_with_loss,
        packed_on_host,
    )
}


def doubled_input(module, args):
    return (args[0] * 2,)


def with_keywords(module, args, kwargs):
    return (args[0] + 1,), {"factor": kwargs["factor"] * 3}


def after_with_keywords(module, args, kwargs, output):
    return output * kwargs["factor"]


class Factor(nn.Linear):
    def forward(self, x, factor=1.0):
        return super().forward(x) * factor


def keyword_layer(m):
    m.fc = Factor(4, 4)


def keywords_before(m):
    keyword_layer(m)
    m.fc.register_forward_pre_hook(with_keywords, with_kwargs=True)


def keywords_after(m):
    keyword_layer(m)
    m.fc.register_forward_hook(after_with_keywords, with_kwargs=True)


def reinitialised(m):
    for p in m.fc.parameters():
        torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(3))


def in_order(m):
    m.fc.register_forward_hook(lambda module, args, output: output + 1)
    m.fc.register_forward_hook(lambda module, args, output: output * 2, prepend=True)


def counting(m):
    """A hook that keeps a count on its module."""
    m.seen = 0

    def count(module, args):
        m.seen += 1

    m.fc.register_forward_pre_hook(count)


def with_state(m):
    def average(module, args, output):
        with torch.no_grad():
            m.kept.mul_(0.9).add_(output.mean(0), alpha=0.1)
        return output - m.kept

    m.fc.register_forward_hook(average)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, a, b):
        return self.fc(a) * b, a - b


def two_arguments(m):
    m.two = Two()
    m.two.register_full_backward_hook(lambda module, of_in, of_out: (of_in[0] * 2, of_in[1] * 3))
    m.two.register_full_backward_pre_hook(lambda module, of_out: (of_out[0] + 1, of_out[1] * 2))


def removed(m):
    m.fc.register_forward_hook(lambda module, args, output: output * 0).remove()
    m.fc.register_full_backward_hook(lambda module, given, received: (given[0] * 0,)).remove()


ON_MODULES = {
    "forward_pre": lambda m: m.last.register_forward_pre_hook(doubled_input),
    "forward_pre without a tuple": lambda m: m.last.register_forward_pre_hook(
        lambda module, args: args[0] * 3
    ),
    "forward": lambda m: m.fc.register_forward_hook(lambda module, args, out: out + args[0]),
    "in order": in_order,
    "always_call": lambda m: m.fc.register_forward_hook(
        lambda module, args, output: output * 2, always_call=True
    ),
    "full_backward changes": lambda m: m.last.register_full_backward_hook(
        lambda module, given, received: (given[0] * 0.1 + 1,)
    ),
    "full_backward sees": lambda m: m.last.register_full_backward_hook(
        lambda module, given, received: None
    ),
    "full_backward_pre changes": lambda m: m.last.register_full_backward_pre_hook(
        lambda module, received: (received[0] * 0.1,)
    ),
    "both backward hooks": lambda m: (
        m.last.register_full_backward_pre_hook(lambda module, received: (received[0] + 1,)),
        m.last.register_full_backward_hook(
            lambda module, given, received: (given[0] * received[0].mean(),)
        ),
    ),
    "two backward hooks": lambda m: (
        m.last.register_full_backward_hook(lambda module, given, received: (given[0] + 1,)),
        m.last.register_full_backward_hook(
            lambda module, given, received: (given[0] * 2,), prepend=True
        ),
    ),
    "with host tensors": lambda m: m.last.register_full_backward_hook(
        lambda module, given, received: (given[0] * torch.tensor([1.0, 2, 0, 1]),)
    ),
    "of the first layer": lambda m: m.fc.register_full_backward_pre_hook(
        lambda module, received: (received[0].clamp(-0.1, 0.1),)
    ),
    "of the whole model": lambda m: m.register_full_backward_pre_hook(
        lambda module, received: (received[0] * 0.5, *received[1:])
    ),
    "with state": with_state,
    "removed": removed,
    "of parameters": lambda m: m.fc.weight.register_hook(halved),
    "of the bias by name": lambda m: [p.register_hook(halved) for p in m.last.parameters()],
}

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

PROGRAMS = ON_TENSORS | {
    f"module {name}": prepared(register) for name, register in ON_MODULES.items()
}
PROGRAMS |= {
    "keywords before": (lambda m, x: m.fc(x, factor=2.0), keywords_before),
    "two arguments": (lambda m, x: m.two(m.fc(x), m.scale.expand(5, 4)), two_arguments),
    "keywords after": (lambda m, x: m.fc(x, factor=m.scale), keywords_after),
}


@pytest.mark.parametrize(("program", "prepare"), PROGRAMS.values(), ids=PROGRAMS)
def test_it_trains_as_in_eager_pytorch(program, prepare):
    compare_training(program, prepare)


def test_hooks_of_all_modules():
    handles = [
        global_hooks.register_module_forward_hook(
            lambda module, args, out: out * 2 if isinstance(module, nn.Linear) else None
        ),
        global_hooks.register_module_full_backward_hook(
            lambda module, given, received: (
                (given[0] * 0.5,)
                if isinstance(module, nn.Linear) and given[0] is not None
                else None
            )
        ),
    ]
    try:
        compare_training(lambda m, x: m.last(m.fc(x)) * m.scale[:3])
    finally:
        for handle in handles:
            handle.remove()
