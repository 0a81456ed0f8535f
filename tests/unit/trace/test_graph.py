"""The graph of a trace: placeholders, results, types."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch
from popsim_torch.trace.graph.markers import MARK
from popsim_torch.trace.graph.origin import origin_of
from tests.unit.trace.traces import Function, Net, X, aten, calls, results, trace_of


def test_placeholders_are_parameters_buffers_inputs_and_the_loss_scale():
    shapes = [(5, 4), (5,), (3, 5), (3,), (3,), (2, 4)]
    for training, expected in ((False, shapes), (True, [*shapes, ()])):
        traced = trace_of(Net(), X, training=training)
        nodes = [node for node in traced.graph_module.graph.nodes if node.op == "placeholder"]
        assert [tuple(node.meta["val"].shape) for node in nodes] == expected
    assert list(traced.parameters) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert list(traced.buffers) == ["shift"]
    assert traced.num_inputs == 1


def test_everything_is_on_the_device():
    traced = trace_of(Net(), X, training=True)
    for node in traced.graph_module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            assert value.device == torch.device("ipu", 0)


def test_results_are_outputs_then_gradients():
    traced = trace_of(Net(), X, training=True)
    assert traced.num_outputs == 2
    assert traced.gradients == list(traced.parameters)
    shapes = [tuple(node.meta["val"].shape) for node in results(traced)]
    assert shapes == [(2, 3), (), (5, 4), (5,), (3, 5), (3,)]


def test_inference_has_no_backward():
    traced = trace_of(Net(), X)
    assert traced.gradients == []
    assert not any(origin_of(node).backward for node in calls(traced))
    assert not calls(traced, MARK)


def test_the_graph_computes_what_forward_computes():
    net = Net()
    twin = copy.deepcopy(net)
    traced = trace_of(net, X, training=True)
    leaves = [p.detach() for p in net.parameters()] + [net.shift, X, torch.tensor(2.0)]
    kept = [n for n in calls(traced) if n.target is MARK]
    for node in kept:
        node.replace_all_uses_with(node.args[0])
        traced.graph_module.graph.erase_node(node)
    for node in calls(traced):
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != "device"}
    traced.graph_module.recompile()
    out, loss, *gradients = traced.graph_module(*leaves)
    expected_out, expected_loss = twin(X)
    (expected_loss * 2).backward()
    torch.testing.assert_close(out, expected_out.detach())
    torch.testing.assert_close(loss, expected_loss.detach())
    for gradient, parameter in zip(gradients, twin.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.parametrize(
    "given, seen",
    [
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.int64, torch.int32),
        (torch.int8, torch.int8),
        (torch.bool, torch.bool),
    ],
    ids=str,
)
def test_types_of_inputs(given, seen):
    dtypes = []
    trace_of(Function(lambda x: dtypes.append(x.dtype) or x), torch.ones(2).to(given))
    assert dtypes == [seen]


HALF, FLOAT = torch.float16, torch.float32


LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (2, 4)),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), (2, 4)),
    "linear of rank 3": (lambda: nn.Linear(4, 3), (2, 5, 4)),
    "conv": (lambda: nn.Conv1d(4, 3, 1), (2, 4, 5)),
    "conv transpose": (lambda: nn.ConvTranspose2d(4, 3, 1), (2, 4, 5, 5)),
    "layer norm": (lambda: nn.LayerNorm(4), (2, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4)),
    "batch norm": (lambda: nn.BatchNorm1d(4), (2, 4)),
    "batch norm in eval": (lambda: nn.BatchNorm1d(4).eval(), (2, 4)),
}


@pytest.mark.parametrize("layer, shape", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("given, weights", [(HALF, FLOAT), (FLOAT, HALF)], ids=["half in", "float"])
def test_layers_run_in_the_type_of_their_input(layer, shape, given, weights):
    class Trains(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer().to(weights)

        def forward(self, x):
            out = self.layer(x)
            return out, poptorch.identity_loss(out, "sum")

    traced = trace_of(Trains(), torch.ones(shape, dtype=given), training=True)
    out, _, *gradients = results(traced)
    assert out.meta["val"].dtype == given
    assert {gradient.meta["val"].dtype for gradient in gradients} == {weights}


def indexed(x, y):
    x = x.clone()
    x[torch.arange(3)] = y
    return x


MIXED = {
    "matmul": torch.matmul,
    "@": lambda a, b: a @ b,
    "mm": torch.mm,
    "bmm": lambda a, b: (a[None] @ b[None])[0],
    "addmm": lambda a, b: torch.addmm(a, a, b),
    "addmm of a bias": lambda a, b: torch.addmm(a[0], b, b),
    "mv": lambda a, b: torch.mv(a, b[0]),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "addbmm": lambda a, b: torch.addbmm(a, b[None], b[None]),
    "cross": torch.linalg.cross,
    "index_copy": lambda a, b: a.index_copy(0, torch.arange(3), b),
    "index_add": lambda a, b: a.index_add(0, torch.arange(3), b),
    "index_put": indexed,
    "heaviside": torch.heaviside,
    "grid_sample": lambda a, b: F.grid_sample(
        a[None, None], b[None, None, :, :2], align_corners=False
    ),
}
EITHER_FIRST = pytest.mark.parametrize("types", [(HALF, FLOAT), (FLOAT, HALF)], ids=str)


@pytest.mark.parametrize("name", MIXED)
@EITHER_FIRST
def test_activations_of_two_types_are_refused_like_in_eager_torch(name, types):
    a, b = (torch.ones(3, 3, dtype=dtype) for dtype in types)
    with pytest.raises(RuntimeError):
        MIXED[name](a, b)
    where = r"(?s) at .*\.py:\d+: .*(same|expected|match|different).*Convert one of them"
    with pytest.raises(poptorch.Error, match=where):
        trace_of(Function(MIXED[name]), a, b)
    trace_of(Function(lambda a, b: MIXED[name](a.float(), b.float())), a, b)


@EITHER_FIRST
def test_a_product_with_a_parameter_has_the_type_of_the_activation(types):
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 3, dtype=types[1]))

        def forward(self, x):
            return x @ self.weight

    (out,) = results(trace_of(Product(), torch.ones(3, 3, dtype=types[0])))
    assert out.meta["val"].dtype == types[0]


@pytest.mark.parametrize("function", [torch.add, torch.maximum, F.mse_loss, torch.atan2])
@EITHER_FIRST
def test_what_eager_torch_promotes_is_promoted(function, types):
    a, b = (torch.ones(3, 3, dtype=dtype) for dtype in types)
    (out,) = results(trace_of(Function(function), a, b))
    assert out.meta["val"].dtype == function(a, b).dtype


def test_autocast_decides_the_type_of_a_product():
    def function(a, b):
        with torch.autocast("cpu", dtype=torch.float16):
            return a @ b

    (out,) = results(trace_of(Function(function), torch.ones(3, 3), torch.ones(3, 3).half()))
    assert out.meta["val"].dtype == HALF


def test_mutations_are_still_in_the_graph():
    traced = trace_of(Function(lambda x: x.add_(1)), X)
    assert calls(traced, aten.add_.Tensor)
