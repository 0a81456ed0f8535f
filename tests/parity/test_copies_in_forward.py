"""Python's ``copy`` module in forward: a shallow copy has the memory, but no history."""

import copy

import torch

import popsim_torch as poptorch
from tests.parity.compare import quiet_options
from tests.parity.functions import compare_with_eager, in_both


def of_a_changed_result(net, x):
    y = 2 * x
    copied = copy.copy(y)
    copied.add_(1)
    return [net.fc(y), net.fc(copied)]


def of_a_changed_host_tensor(net, x):
    table = net.host.clone()
    table[0] = x.sum()
    return net.fc(x * copy.deepcopy(table))


FUNCTIONS = {
    "an input": lambda net, x: net.fc(copy.copy(x)),
    "a weight": lambda net, x: x @ copy.copy(net.fc.weight).t(),
    "a result": lambda net, x: copy.copy(net.fc(x)),
    "a changed result": of_a_changed_result,
    "a layer": lambda net, x: copy.copy(net.fc)(x),
    "a dict": lambda net, x: copy.copy({"it": net.fc(x)})["it"],
    "deep, a weight": lambda net, x: x @ copy.deepcopy(net.fc.weight).t(),
    "deep, a layer": lambda net, x: copy.deepcopy(net.fc)(x),
    "deep, a host tensor": of_a_changed_host_tensor,
}


@in_both(FUNCTIONS)
def test_copies(function, kind):
    compare_with_eager(function, kind)


def test_a_copy_has_a_gradient_of_its_own():
    def gradient(_, x):
        copied = copy.copy(x.requires_grad_())
        return torch.autograd.grad((copied.square() * x.detach()).sum(), copied)[0]

    compare_with_eager(gradient, "training")


def test_a_copy_of_a_buffer_changes_it():
    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x):
            copy.copy(self.count).add_(x)
            return 2 * self.count

    model = Counter()
    device = poptorch.inferenceModel(model, quiet_options())
    for expected in (2.0, 4.0):
        torch.testing.assert_close(device(torch.ones(2)), torch.full((2,), expected))
