"""Scopes of modules and of the user in names, and names that clash."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.unit.names.common import Function, Mlp, batch, inference_names_of, make_options


def test_clashing_names_get_a_number_behind_the_whole_name():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.l1 = nn.Linear(4, 4)

        def forward(self, x):
            x = x * x
            x = x * 2
            x = x * 3
            return self.l1(self.l1(x))

    names = inference_names_of(Twice(), torch.ones(2, 4))
    for name in ("Mul:0", "Mul:0/1", "Mul:0/2", "l1/Gemm:0", "l1/Gemm:0/1"):
        assert name in names
    assert "Mul:0/3" not in names


def test_clashes_are_numbered_in_the_order_of_creation():
    options = make_options()
    for name in ("Mul:0", "Mul:0/1", "Mul:0/2"):
        options.anchorTensor(name, name)
    model = poptorch.inferenceModel(Function(lambda x: x * 2 * 3 * 5), options)
    model(torch.ones(1))
    values = [float(model.getAnchoredTensor(n)) for n in ("Mul:0", "Mul:0/1", "Mul:0/2")]
    assert values == [2.0, 6.0, 30.0]


def test_in_place_operators_do_not_shift_names():
    def function(x, change):
        x = x * 2
        if change:
            x.add_(1)
        left, right = x.split(2, 1)
        return left * right.reshape(-1, 2)

    names = [
        inference_names_of(Function(lambda x, change=change: function(x, change)), torch.ones(2, 4))
        for change in (False, True)
    ]
    assert {"Slice:0", "Slice:0/1", "Reshape:0", "Mul:0", "Mul:0/1"} <= set(names[0])
    assert [name for name in names[1] if name != "Add:0"] == names[0]


def test_scopes_are_the_paths_of_the_modules_being_called():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x):
            return self.body(x) * 2

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([Inner(), Inner()])

        def forward(self, x):
            for part in self.parts:
                x = part(x)
            return x.exp()

    names = inference_names_of(Outer(), torch.ones(2, 4))
    for name in (
        "parts/0/body/0/Gemm:0",
        "parts/0/body/1/Tanh:0",
        "parts/0/Mul:0",
        "parts/1/body/1/Tanh:0",
        "parts/1/Mul:0",
        "Exp:0",
    ):
        assert name in names


def test_a_sequential_at_the_top_contributes_its_indices():
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Sequential(nn.Linear(5, 3)))
    names = inference_names_of(net, torch.ones(2, 4))
    for name in ("0.weight", "2.0.bias", "0/Gemm:0", "1/Relu:0", "2/0/Gemm:0"):
        assert name in names


def test_name_scopes():
    def function(x):
        with poptorch.NameScope("a"):
            x = x + 1
            with poptorch.NameScope("b/c"):
                x = x + 2
            x = x + 3
        return x + 4

    names = inference_names_of(Function(function), torch.ones(2))
    assert {"a/Add:0", "a/b/c/Add:0", "a/Add:0/1", "Add:0"} <= set(names)


def test_a_name_scope_sits_at_its_place_among_the_modules():
    class Scoped(nn.Module):
        def __init__(self):
            super().__init__()
            self.l2 = nn.Linear(4, 4)

        def forward(self, x):
            with poptorch.NameScope("a"):
                return self.l2(x.exp())

    net = nn.Module()
    net.l1 = Scoped()
    net.forward = lambda x: net.l1(x)
    names = set(inference_names_of(net, torch.ones(2, 4)))
    assert {"l1/a/Exp:0", "l1/a/l2/Gemm:0", "l1.l2.weight"} <= names


def test_a_name_scope_ends_when_forward_raises():
    broken = {"on": True}

    def function(x):
        with poptorch.NameScope("a"):
            if broken["on"]:
                raise ValueError("ours")
        return x + 1

    model = poptorch.inferenceModel(Function(function), make_options())
    with pytest.raises(ValueError, match="ours"):
        model.compile(torch.ones(2))
    broken["on"] = False
    model.compile(torch.ones(2))
    assert "Add:0" in model.getTensorNames()


def test_without_module_scopes_only_name_scopes_are_left():
    options = make_options()
    options.disableModuleNamescope()

    class Scoped(nn.Module):
        def __init__(self):
            super().__init__()
            self.l1 = nn.Linear(4, 4)

        def forward(self, x):
            with poptorch.NameScope("a"):
                x = self.l1(x)
            return self.l1(x)

    names = inference_names_of(Scoped(), torch.ones(2, 4), options=options)
    assert {"a/Gemm:0", "Gemm:0", "l1.weight"} <= set(names)
    assert not any(name.startswith("l1/") for name in names)


def test_begin_block_and_hooks_add_nothing():
    net = Mlp()
    poptorch.BeginBlock(net.fc1, "first", ipu_id=0)
    net.fc2.register_forward_hook(lambda module, args, out: out * 2)
    names = set(inference_names_of(net, batch()[0]))
    assert {"fc1/Gemm:0", "fc2/Gemm:0"} <= names
    assert names & {"fc2/Mul:0", "Mul:0"}
    assert not any("first" in name for name in names)
