"""What user code sees while it is traced."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch
from tests.unit.trace.traces import Function, Net, X, calls, trace_of


def test_forward_runs_once():
    count = []
    trace_of(Function(lambda x: count.append(1) or x + 1), X)
    assert count == [1]


def test_forward_knows_that_it_is_traced():
    seen = []
    trace_of(Function(lambda x: seen.append(poptorch.isRunningOnIpu()) or x), X)
    assert seen == [True]
    assert not poptorch.isRunningOnIpu()


def test_parameters_are_still_parameters():
    seen = []

    class Looks(Net):
        def forward(self, x):
            seen.append(isinstance(self.fc1.weight, nn.Parameter))
            seen.append(len(list(self.parameters())))
            seen.append(self.fc1.weight.device.type)
            return super().forward(x)

    trace_of(Looks(), X)
    assert seen == [True, 4, "ipu"]


def test_gradients_are_enabled_in_training_only():
    seen = []
    module = Function(lambda x: seen.append(torch.is_grad_enabled()) or x)
    trace_of(module, X)
    assert seen == [False]
    assert torch.is_grad_enabled()


FACTORIES = {
    "zeros": lambda: torch.zeros(2),
    "ones": lambda: torch.ones(2),
    "full": lambda: torch.full((2,), 3.0),
    "arange": lambda: torch.arange(2.0),
    "linspace": lambda: torch.linspace(0, 1, 2),
    "rand": lambda: torch.rand(2),
    "randn": lambda: torch.randn(2),
    "randint": lambda: torch.randint(0, 5, (2,)),
    "tensor": lambda: torch.tensor([1.0, 2.0]),
    "as_tensor": lambda: torch.as_tensor([1.0, 2.0]),
    "eye": lambda: torch.eye(2),
}


@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
def test_factories_make_device_tensors(make):
    devices = []

    def function(x):
        tensor = make()
        devices.append(tensor.device.type)
        return x[0, :2] + tensor

    trace_of(Function(function), X)
    assert devices == ["ipu"]


@pytest.mark.parametrize("name", ["arange", "range", "normal", "tensor", "randperm"])
def test_a_factory_without_a_device_is_warned_of(name, caplog):
    make = {
        "arange": lambda **there: torch.arange(4.0, **there),
        "range": lambda **there: torch.range(0, 3, **there),
        "normal": lambda **there: torch.normal(0.0, 1.0, (4,), **there),
        "tensor": lambda **there: torch.tensor(2.0, **there),
        "randperm": lambda **there: torch.randperm(4, **there),
    }[name]
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        trace_of(Function(lambda x: x + make(device=x.device) + make(device="cpu")), X)
        assert "No device set" not in caplog.text
        caplog.clear()
        trace_of(Function(lambda x: x + make()), X)
    (record,) = caplog.records
    text = f"No device set in torch.{name}(): forcing to IPU at {__file__}:"
    assert record.getMessage().startswith(text)


def test_functions_that_make_tensors_inside_are_not_warned_of(caplog):
    def function(x):
        counts = torch.bincount(x.long().flatten(), minlength=4)
        return F.one_hot(counts, 4).sum(0) + x.clone().random_(0, 3) + torch.isfinite(x)

    with caplog.at_level(logging.WARNING, "poptorch::python"):
        trace_of(Function(function), X)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.bfloat16, torch.float32), (torch.float16, torch.float16)]
)
@pytest.mark.parametrize("device", ["ipu", "cpu"])
def test_autocast_chooses_dtypes_of_the_device(device, dtype, expected):
    @torch.autocast(device, dtype=dtype)
    def function(x):
        return x @ x.t()

    def plain(x):
        with torch.autocast(x.device.type, dtype=dtype):
            return x @ x.t()

    for forward in (function, plain):
        (result,) = trace_of(Function(forward), X).graph_module.graph.output_node().args[0]
        assert result.meta["val"].dtype == expected


def test_a_factory_told_to_stay_on_the_host_stays():
    devices = []

    def function(x):
        tensor = torch.zeros(2, device="cpu")
        devices.append(tensor.device.type)
        return x + float(tensor.sum())

    trace_of(Function(function), X)
    assert devices == ["cpu"]


def test_distributions_do_not_check_their_arguments(monkeypatch):
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)

    def function(x):
        return torch.distributions.Normal(x.abs(), x.abs() + 1).log_prob(x)

    trace_of(Function(function), X)
    assert torch.distributions.Distribution._validate_args is True


def test_dropout_is_gone_in_inference_and_there_in_training():
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return poptorch.identity_loss(F.dropout(x * self.w, 0.5, training=True), "sum")

    def random_ops(traced):
        return [
            n
            for n in calls(traced)
            if isinstance(n.target, torch._ops.OpOverload)
            and torch.Tag.nondeterministic_seeded in n.target.tags
        ]

    assert not random_ops(trace_of(Drops(), X))
    assert len(random_ops(trace_of(Drops(), X, training=True))) == 1


@pytest.mark.parametrize(
    "kind",
    [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout],
)
def test_every_dropout_is_the_identity_in_inference(kind):
    layer = kind(0.5).train()
    traced = trace_of(layer, torch.ones(1, 2, 3, 4, 5))
    assert calls(traced) == []
