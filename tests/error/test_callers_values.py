"""Arguments that forward changes, of which the caller does not see the change."""

import collections
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import popsim_torch as poptorch

X = torch.tensor([1.0, 2.0])


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, *args, **kwargs):
        return self._function(*args, **kwargs)


def model_of(function):
    net = Net(function)
    net.forward = function  # its signature counts
    return poptorch.inferenceModel(net)


def warned(caplog):
    return [one.getMessage() for one in caplog.records if "the caller" in one.getMessage()]


def replaces_item(xs):
    xs[0] = xs[0] * 2
    return xs[0]


def replaces_value(xs):
    xs["a"] = xs["a"] * 2
    return xs["a"]


def replaces_inside(xs):
    xs[1]["a"] = xs[1]["a"] * 2
    return xs[1]["a"]


def takes_away(xs):
    return xs.pop("a") * 2


def appends(xs):
    xs.append(xs[0] * 2)
    return xs[-1]


CONTAINERS = {
    "an item": (replaces_item, lambda: [X.clone()], "the list that is passed as xs"),
    "a value": (replaces_value, lambda: {"a": X.clone()}, "the dict that is passed as xs"),
    "inside": (replaces_inside, lambda: (1, {"a": X.clone()}), "the dict that is passed as xs[1]"),
    "taken away": (takes_away, lambda: {"a": X.clone()}, "the dict that is passed as xs"),
    "appended": (appends, lambda: [X.clone()], "the list that is passed as xs"),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_changed_containers_are_warned_of(name, caplog):
    function, make, text = CONTAINERS[name]
    model = model_of(function)
    xs = make()
    torch.testing.assert_close(model(xs), function(make()))
    (message,) = warned(caplog)
    assert text in message
    torch.testing.assert_close(xs, make())
    torch.testing.assert_close(model(make()), function(make()))


def test_other_changes_are_not_warned_of(caplog):
    def forward(xs, *rest, **named):
        xs[0] = xs[0].to(torch.float32)  # the same tensor
        xs[0].add_(named.pop("n"))
        inner = list(xs)
        inner.append(2 * xs[0])
        return inner[-1] + rest[0]

    ours, eager = [X.clone()], [X.clone()]
    model = model_of(forward)
    torch.testing.assert_close(model(ours, X, n=3), forward(eager, X, n=3))
    torch.testing.assert_close(ours, eager)
    assert not warned(caplog)


@pytest.mark.parametrize(
    "data", [lambda x: x * 2, lambda x: x[:1] * 2, lambda x: torch.ones(2), lambda x: x.data + 1]
)
def test_other_data_of_an_input_are_warned_of(data, caplog):
    def forward(x):
        x.data = data(x)
        return x + 1

    x = X.clone()
    model = model_of(forward)
    torch.testing.assert_close(model(x), forward(X.clone()))
    (message,) = warned(caplog)
    assert "assigns other data to the input x" in message
    torch.testing.assert_close(x, X)


def test_the_same_data_of_an_input(caplog):
    def forward(x):
        x.data = x.data
        x.data.add_(1)
        y = x * 2
        y.data = x.data + 1
        return y

    ours, eager = X.clone(), X.clone()
    torch.testing.assert_close(model_of(forward)(ours), forward(eager))
    torch.testing.assert_close(ours, eager)
    assert not warned(caplog)


@pytest.mark.parametrize(
    "make", [SimpleNamespace, lambda: collections.deque([1]), lambda: SimpleNamespace(kept=[])]
)
def test_tensors_in_an_object_of_the_caller_are_refused(make):
    def forward(x, cache):
        if isinstance(cache, collections.deque):
            cache.append(x * 2)
        elif hasattr(cache, "kept"):
            cache.kept.append(x * 2)
        else:
            cache.last = x * 2
        return x + 1

    with pytest.raises(poptorch.Error, match=r"puts a tensor .* passed as cache\. .* Return it"):
        model_of(forward)(X, make())


def test_numbers_in_an_object_of_the_caller():
    def forward(x, cache):
        cache.length = 3
        return x + cache.length

    class Cache:
        pass

    cache = Cache()
    torch.testing.assert_close(model_of(forward)(X, cache), X + 3)
    assert cache.length == 3
