"""What the user has set on parameters and buffers is there in forward."""

import pytest
import torch

from tests.parity import functions
from tests.parity.functions import compare_with_eager, in_both

MASK = torch.tensor([1.0, 0.0, 1.0])


def decayed(net, x):
    decays = [p for p in net.parameters() if getattr(p, "decays", False)]
    return sum(p.square().sum() for p in decays) + net.fc(x).sum()


def of_a_buffer(net, x):
    return net.fc(x) * (2 if getattr(net.sizes, "unit", None) == "m" else 3)


def asks_for_gradients(net, x):
    return net.fc(x) * sum(1 for p in net.parameters() if p.requires_grad)


def with_a_hook(net, x):
    if net.fc.weight.requires_grad:
        net.fc.weight.register_hook(lambda gradient: 2 * gradient).remove()
    return net.fc(x)


def frozen_by_method(net, x):
    net.fc.weight.requires_grad_(False)
    scale = 2 if net.fc.weight.requires_grad else 3
    net.fc.weight.requires_grad_()
    return scale * net.fc(x) * (2 if net.fc.weight.requires_grad else 3)


def frozen_by_assignment(net, x):
    net.fc.weight.requires_grad = False
    scale = 2 if net.fc.weight.requires_grad else 3
    net.fc.weight.requires_grad = True
    return scale * net.fc(x)


FUNCTIONS = {
    "frozen by a method": frozen_by_method,
    "frozen by an assignment": frozen_by_assignment,
    "a hook of a weight": with_a_hook,
    "a tensor": lambda net, x: net.fc(x) * net.fc.bias.mask,
    "of a private name": lambda net, x: net.fc(x) * net.fc.bias._scale,
    "a number": decayed,
    "of a buffer": of_a_buffer,
    "requires_grad": asks_for_gradients,
    "requires_grad of a result": lambda net, x: (
        net.fc(x) * (2 if (net.fc.weight + 1).requires_grad == torch.is_grad_enabled() else 3)
    ),
}


@pytest.fixture(autouse=True)
def attributes(monkeypatch):
    """Set attributes on the parameters of each model that the comparison makes."""

    class Marked(functions.Calls):
        def __init__(self, function, training):
            super().__init__(function, training)
            self.fc.weight.decays = True
            self.fc.bias.mask = MASK
            self.fc.bias._scale = 0.5
            self.sizes.unit = "m"

        def __deepcopy__(self, memo):
            twin = Marked(self._function, self._training)
            twin.load_state_dict(self.state_dict())
            return twin

    monkeypatch.setattr(functions, "Calls", Marked)


@in_both(FUNCTIONS)
def test_like_eager(function, kind):
    compare_with_eager(function, kind)
