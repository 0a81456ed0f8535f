"""torch.utils.checkpoint: values inside are rebuilt in the backward pass, to the same bits."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import popsim_torch as poptorch
from tests.options import make_options

WIDTH = 16


def layer():
    """Return layers with random numbers, and with a norm that keeps statistics."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.GELU(),
        nn.Dropout(0.3),
        nn.Linear(WIDTH, WIDTH),
    )


class Recurrent(nn.Module):
    """An LSTM over a sequence that is a row."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        return self.lstm(x.view(len(x), -1, 4))[0].reshape(len(x), -1)


class Image(nn.Module):
    """A convolution over rows seen as images."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, x):
        y = torch.relu(self.conv(x.view(len(x), 1, 4, 4)))
        return nn.functional.max_pool2d(y, (1, 2)).flatten(1)


PARTS = {"layers": layer, "lstm": Recurrent, "convolution": Image}


def only(part, x, **settings):
    return checkpoint(part, x, use_reentrant=False, **settings)


def with_keywords(part, x):
    def function(x, *, scale, unused=None):
        return part(x) * scale, x

    return checkpoint(function, x, scale=1.0, use_reentrant=False)[0]


def nested(part, x):
    def function(x):
        y = only(part, torch.tanh(x))
        return torch.sigmoid(y) * y

    return only(function, x)


def nested_without(part, x):
    y = part(torch.tanh(x))
    return torch.sigmoid(y) * y


def of_tuples(part, x):
    def function(pair):
        return {"sum": part(pair[0]) + pair[1]}

    return only(function, (x, x))["sum"]


def save_products(_context, operator, *_args, **_kwargs):
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    save = operator in products
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def selective(policy):
    return functools.partial(create_selective_checkpoint_contexts, policy)


def direct(part, x):
    return part(x)


# What wraps a part, and what it computes.
WAYS = {
    "plain": (only, direct),
    "reentrant": (lambda part, x: checkpoint(part, x, use_reentrant=True), direct),
    "keywords": (with_keywords, direct),
    "tuples": (of_tuples, lambda part, x: part(x) + x),
    "nested": (nested, nested_without),
    "settings": (
        functools.partial(
            only, preserve_rng_state=False, determinism_check="none", early_stop=False
        ),
        direct,
    ),
    "policy": (functools.partial(only, context_fn=selective(save_products)), direct),
    "bool policy": (functools.partial(only, context_fn=selective(lambda *_, **__: True)), direct),
    "list": (functools.partial(only, context_fn=selective([torch.ops.aten.addmm.default])), direct),
}


class Net(nn.Module):
    """Two parts that ``wrap`` calls, each on a stage of its own if it is staged."""

    def __init__(self, make, wrap, *, staged=False):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(make() for _ in range(2))
        self._wrap, self._staged = wrap, staged

    def forward(self, x, y):
        for number, part in enumerate(self.parts):
            if self._staged:
                poptorch.Block.start(ipu_id=number)
            x = self._wrap(part, x if number else self.first(x))
        return x, poptorch.identity_loss(((x - y) ** 2).mean(), "none")


def train(make, wrap, *, dtype=torch.float32, staged=False, mode=None, ga=3):
    """Return what calls and the weights after them show, and the executor."""
    torch.manual_seed(1)
    net = Net(make, wrap, staged=staged).to(dtype)
    options = make_options(1, ga, seed=3)
    options.outputMode(poptorch.OutputMode.All).autoRoundNumIPUs(True)
    if mode is not None:
        options._Popart.set("autoRecomputation", mode)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model = poptorch.trainingModel(net, options, optimizer)
    seen = model(*torch.randn(2, 4 * ga, WIDTH).to(dtype))
    # (running statistics get a batch twice: tests/parity/test_user_rules_checkpoints.py)
    state = [value for name, value in net.state_dict().items() if "running" not in name]
    return [*seen, *(value.clone() for value in state)], model


@functools.cache
def without(name, inner, dtype=torch.float32):
    return train(PARTS[name], inner, dtype=dtype)[0]


def assert_same(ours, theirs):
    assert all(torch.isfinite(value).all() for value in ours)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def copies(model):
    return {name for name in model.getTensorNames() if name.endswith("__re")}


def arena_bytes(model):
    return model.compiled.executable.plan.arena_bytes


@pytest.mark.parametrize("way", WAYS)
def test_it_changes_no_bit(way):
    wrap, inner = WAYS[way]
    seen, model = train(layer, wrap)
    assert_same(seen, without("layers", inner))
    assert bool(copies(model)) == (way != "bool policy")


@pytest.mark.parametrize(
    ("part", "dtype"),
    [*((part, torch.float16) for part in PARTS), ("lstm", torch.float32)],
)
def test_it_changes_no_bit_of_any_layer(part, dtype):
    seen, model = train(PARTS[part], only, dtype=dtype)
    assert_same(seen, without(part, direct, dtype))
    assert copies(model)


@pytest.mark.parametrize(("staged", "mode"), [(False, 1), (False, 4), (True, 0), (True, 3)])
def test_beside_recomputation_of_the_options(staged, mode):
    seen, model = train(layer, only, staged=staged, mode=mode)
    assert_same(seen, without("layers", direct))
    assert copies(train(layer, only, staged=staged, mode=0)[1]) <= copies(model)


def test_in_sequence():
    def in_two(part, x):
        return checkpoint_sequential(part, 2, x, use_reentrant=False)

    seen, model = train(layer, in_two)
    assert_same(seen, without("layers", direct))
    assert copies(model)


def test_dropout_masks_are_drawn_again_and_the_same():
    _, model = train(nn.Identity, lambda _, x: only(nn.Dropout(0.5), x), ga=1)
    ops = model.compiled.program.graph.ops
    streams = [op.attributes["stream"] for op in ops if op.kind == "random"]
    assert len(streams) == 4 and len(set(streams)) == 2


# Memory


class Wide(nn.Module):
    """Layers whose values between the products are wide."""

    def __init__(self, wrap):
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32), nn.Dropout(0.1))
            for _ in range(6)
        )
        self._wrap = wrap

    def forward(self, x):
        x = self.first(x)
        for part in self.layers:
            x = x + self._wrap(part, x)
        return poptorch.identity_loss(x.square().mean(), "none")


def arena_of_wide(wrap):
    model = poptorch.trainingModel(Wide(wrap), make_options(seed=1))
    model.compile(torch.randn(256, 32))
    return arena_bytes(model)


def test_it_takes_less_memory():
    plain = arena_of_wide(direct)
    whole = arena_of_wide(only)
    selected = arena_of_wide(functools.partial(only, context_fn=selective(save_products)))
    assert whole < 0.45 * plain
    assert whole < selected < plain


def test_what_leaves_a_region_is_kept():
    _, model = train(layer, only, ga=1)
    names = copies(model)
    assert "parts/1/2/Gelu:0__re" in names
    assert not any(name.startswith("parts/0/4") for name in names)  # the next one begins with it


def test_inference_keeps_nothing_anyway():
    net = Net(layer, only).eval()
    plain = Net(layer, direct).eval()
    plain.load_state_dict(net.state_dict())
    x = torch.randn(2, 4, WIDTH)
    ours, expected = (poptorch.inferenceModel(n, make_options())(*x) for n in (net, plain))
    assert_same(ours, expected)


# Contexts and mistakes


def test_the_forward_context_is_entered_and_the_other_one_is_not():
    entered = []

    class Context:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            entered.append(self.name)

        def __exit__(self, *_):
            entered.append(f"{self.name} left")

    def context_fn():
        return Context("forward"), Context("again")

    train(layer, functools.partial(only, context_fn=context_fn), ga=1)
    assert entered == ["forward", "forward left"] * 2


def test_a_check_that_there_is_not():
    with pytest.raises(ValueError, match="determinism_check should be one of"):
        train(layer, functools.partial(only, determinism_check="bits"), ga=1)


def test_an_error_inside_leaves_the_region():
    failing = [True]

    def wrap(part, x):
        def function(x):
            if failing:
                raise KeyError("inside")
            return part(x)

        return only(function, x)

    net = Net(layer, wrap)
    model = poptorch.trainingModel(net, make_options(seed=3))
    with pytest.raises(KeyError, match="inside"):
        model(*torch.randn(2, 4, WIDTH))
    failing.clear()
    assert torch.isfinite(model(*torch.randn(2, 4, WIDTH))[1])


def test_outside_of_a_trace_it_is_that_of_torch():
    train(layer, only, ga=1)
    net = Net(layer, only)
    runs = []
    net.parts[0].register_forward_pre_hook(lambda *_: runs.append(1))
    net(*torch.randn(2, 4, WIDTH))[1].backward()
    assert len(runs) == 2
