"""``type(x)`` and ``x.data_ptr()`` of tensors of the device in the code of a model."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch
from tests.parity import type_users
from tests.parity.compare import quiet_options
from tests.parity.functions import compare_with_eager, in_both


def doubled(x):
    return 2 * x


def by_kind(value):
    return {torch.Tensor: doubled, list: sum}[type(value)](value)


class Both(type):
    def __call__(cls, *args):
        return type.__call__(cls, *args)

    def __new__(mcs, name, bases, names):
        return type.__new__(mcs, name, bases, names)


class Two(metaclass=Both):
    def __init__(self, number):
        self.number = number


USES = {
    "is": lambda m, x: x * 2 if type(x) is torch.Tensor else x * 3,
    "equals": lambda m, x: x * 2 if type(x) == torch.Tensor else x * 3,  # noqa: E721
    "in": lambda m, x: x * 2 if type(x) in (list, torch.Tensor) else x * 3,
    "name": lambda m, x: x * 2 if type(x).__name__ == "Tensor" else x * 3,
    "table": lambda m, x: by_kind(x) + by_kind([x, x]),
    "parameter": lambda m, x: x * (2 if type(m.fc.weight) is nn.Parameter else 3),
    "buffer": lambda m, x: x * (2 if type(m.ones) is torch.Tensor else 3),
    "result": lambda m, x: x * (2 if type(m.fc(x) + 1) is torch.Tensor else 3),
    "same kind": lambda m, x: x * (2 if type(x) is type(m.ones) else 3),
    "of a class": lambda m, x: x * (2 if isinstance(nn.Linear, type) else 3),
    "of a metaclass": lambda m, x: x * (2 if issubclass(Both, type) and type(Both) is type else 3),
    "through a metaclass": lambda m, x: x * Two(2).number * Both("Three", (), {"n": 3}).n,
    "an attribute": lambda m, x: x * (2 if type.__name__ == "type" and type.mro(Two) else 3),
    "of others": lambda m, x: x * (2 if type(x.dim()) is int and type(m) is Net else 3),
    "new": lambda m, x: x * type("Two", (), {"number": 2})().number,
    "annotation": lambda m, x: x * len(type[int].__args__),
}


class Net(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.register_buffer("ones", torch.ones(3))
        self.use = use

    def forward(self, x):
        return self.use(self, x)


@pytest.mark.parametrize("name", USES)
def test_like_eager(name):
    net = Net(USES[name])
    x = torch.randn(2, 3)
    result = poptorch.inferenceModel(net, quiet_options())(x)
    torch.testing.assert_close(result, net(x).detach())
    assert "type" not in globals()


class Regularised(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x, y):
        squares = [(p**2).sum() for p in self.parameters() if type(p) is nn.Parameter]
        return poptorch.identity_loss(F.mse_loss(self.fc(x), y) + sum(squares), "none")


def test_training():
    net = Regularised()
    eager = copy.deepcopy(net)
    model = poptorch.trainingModel(net, quiet_options(), torch.optim.SGD(net.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    for _ in range(3):
        model(x, y)
        optimizer.zero_grad()
        eager(x, y).backward()
        optimizer.step()
    torch.testing.assert_close(net.fc.weight, eager.fc.weight)


def of_rows_at_a_mask(net, x):
    mask = x[:, 0] > 0.2
    return net.fc(x)[mask].sum() * (2 if type(x[mask]) is torch.Tensor else 3)


def memory(net, x):
    """What addresses tell, as a number."""
    y = x + 1
    weight, bias = net.fc.weight, net.fc.bias
    found = [
        weight.data_ptr() == bias.data_ptr(),
        weight.data_ptr() == weight.view(-1).data_ptr(),
        len({p.data_ptr() for p in net.parameters()}) == 2,
        x.data_ptr() == y.data_ptr(),
        y[1:].data_ptr() - y.data_ptr() == 16,
        y.t().data_ptr() == y.data_ptr(),
    ]
    return net.fc(x) * sum(2**i for i, one in enumerate(found) if one)


@type_users.doubling
def decorated(net, x):
    return net.fc(x)


def with_a_hook(net, x):
    handle = net.fc.register_forward_hook(type_users.doubling_hook)
    result = net.fc(x)
    handle.remove()
    return result


@in_both(
    {
        "a function": lambda net, x: type_users.doubled(net.fc(x)),
        "an object": lambda net, x: type_users.Doubler()(net.fc(x)),
        "a global object": lambda net, x: type_users.doubler(net.fc(x)),
        "a partial function": lambda net, x: type_users.partial(net.fc(x)),
        "a table": lambda net, x: type_users.functions["doubled"](net.fc(x)),
        "rules of gradients": lambda net, x: type_users.Doubled.apply(net.fc(x)),
        "a decorator": decorated,
        "a hook": with_a_hook,
        "rows at a mask": of_rows_at_a_mask,
        "addresses": memory,
    }
)
def test_in_another_file(function, kind):
    compare_with_eager(function, kind)
    assert "type" not in vars(type_users)


def test_the_name_is_gone_after_an_error():
    def fails(m, x):
        assert type(x) is torch.Tensor
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        poptorch.inferenceModel(Net(fails), quiet_options())(torch.ones(3))
    assert "type" not in globals()


def test_models_that_are_traced_in_several_threads():
    results = {}

    def run(number):
        model = poptorch.inferenceModel(Net(USES["is"]), quiet_options())
        results[number] = model(torch.ones(3))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [0, 1, 2, 3]
    assert all(torch.equal(one, 2 * torch.ones(3)) for one in results.values())
    assert "type" not in globals()
