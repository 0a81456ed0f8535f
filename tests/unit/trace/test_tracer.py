"""Tracing a module: what the graph holds, and that nothing else has changed."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch
from popsim_torch.errors import Error
from popsim_torch.stages import PipelinedExecution, StageAssigner
from popsim_torch.trace import TraceRequest, check_traceable, trace
from popsim_torch.trace.markers import CONSTANT, MARK, PRINT
from popsim_torch.trace.origin import origin_of

aten = torch.ops.aten


def trace_of(module, *inputs, training=False):
    """Trace a module called with tensors like these."""

    return trace(
        TraceRequest(
            module,
            [(tuple(x.shape), x.dtype) for x in inputs],
            lambda tensors: (tuple(tensors), {}),
            training,
            StageAssigner(PipelinedExecution()),
        )
    )


def calls(traced, *targets):
    """Return the graph's calls, those of the given operators only if there are any."""
    nodes = [n for n in traced.graph_module.graph.nodes if n.op == "call_function"]
    return [n for n in nodes if not targets or n.target in targets]


def results(traced):
    return list(list(traced.graph_module.graph.nodes)[-1].args[0])


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, *args):
        return self._function(*args)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 5)
        self.fc2 = nn.Linear(5, 3)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x):
        out = self.fc2(torch.tanh(self.fc1(x))) + self.shift
        return out, poptorch.identity_loss(out, "mean")


X = torch.randn(2, 4)


# The graph


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
        (torch.int64, torch.int64),
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


@pytest.mark.parametrize("product", [torch.matmul, torch.mm, lambda a, b: (a[None] @ b[None])[0]])
@pytest.mark.parametrize("types", [(HALF, FLOAT), (FLOAT, HALF)], ids=["half first", "float first"])
def test_a_product_of_two_types_is_float(product, types):
    a, b = (torch.ones(3, 3, dtype=dtype) for dtype in types)
    (out,) = results(trace_of(Function(product), a, b))
    assert out.meta["val"].dtype == FLOAT


def test_mutations_are_still_in_the_graph():
    traced = trace_of(Function(lambda x: x.add_(1)), X)
    assert calls(traced, aten.add_.Tensor)


# What forward sees


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


# Constants


def test_host_tensors_become_constants():
    table = torch.tensor([1.0, 2.0, 3.0, 4.0])
    traced = trace_of(Function(lambda x: x + table), X)
    assert len(calls(traced, CONSTANT)) == 1
    assert torch.equal(traced.constants[0], table)


def test_a_host_tensor_is_captured_once():
    table = torch.ones(4)
    traced = trace_of(Function(lambda x: (x + table) * table), X)
    assert len(traced.constants) == 1
    assert len(calls(traced, CONSTANT)) == 1


def test_a_constant_has_the_value_of_its_use():
    table = torch.zeros(4)

    def function(x):
        x = x + table
        table.add_(1)
        return x + table

    traced = trace_of(Function(function), X)
    assert [float(value[0]) for value in traced.constants] == [0.0, 1.0]


def test_a_constant_is_not_the_users_memory():
    table = torch.zeros(4)
    traced = trace_of(Function(lambda x: x + table), X)
    table.fill_(9)
    assert torch.equal(traced.constants[0], torch.zeros(4))


def test_temporary_host_tensors_are_told_apart():
    """The id of a tensor that is gone is given to the next one."""

    def function(x):
        for value in range(5):
            x = x + torch.full((4,), float(value), device="cpu")
        return x

    traced = trace_of(Function(function), X)
    assert [float(value[0]) for value in traced.constants] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_arithmetic_on_host_tensors_happens_now():
    table = torch.ones(4)
    traced = trace_of(Function(lambda x: x + (table * 2 + 1).sum()), X)
    assert [float(value) for value in traced.constants] == [12.0]


# Origins


def test_origins_have_scope_and_direction():
    traced = trace_of(Net(), X, training=True)
    (first, second) = calls(traced, aten.addmm.default)
    assert origin_of(first).scope == "fc1"
    assert origin_of(second).scope == "fc2"
    (tanh,) = calls(traced, aten.tanh.default)
    assert origin_of(tanh).scope == ""
    (back,) = calls(traced, aten.tanh_backward.default)
    assert origin_of(back).backward
    assert not origin_of(tanh).backward


def test_backward_has_the_scope_of_its_forward():
    traced = trace_of(Net(), X, training=True)
    scopes = [origin_of(n).scope for n in calls(traced, aten.mm.default) if origin_of(n).backward]
    assert set(scopes) == {"fc1", "fc2"}


def test_the_source_is_the_users_line():
    traced = trace_of(Net(), X)
    (tanh,) = calls(traced, aten.tanh.default)
    path, line = origin_of(tanh).source.rsplit(":", 1)
    assert path == __file__
    with open(__file__, encoding="utf-8") as file:
        assert "torch.tanh(self.fc1(x))" in file.readlines()[int(line) - 1]


def test_stages():
    class Staged(Net):
        def forward(self, x):
            poptorch.Block.start("a", ipu_id=0)
            x = torch.tanh(self.fc1(x))
            poptorch.Block.start("b", ipu_id=1)
            return self.fc2(x), poptorch.identity_loss(self.fc2(x), "sum")

    traced = trace_of(Staged(), X, training=True)
    stages = {origin_of(n).stage for n in calls(traced, aten.tanh.default)}
    assert stages == {0}
    assert {origin_of(n).stage for n in calls(traced, aten.addmm.default)} == {0, 1}
    (back,) = calls(traced, aten.tanh_backward.default)
    assert origin_of(back).stage == 0


# Gradients


def test_every_activation_and_parameter_has_a_mark():
    traced = trace_of(Net(), X, training=True)
    assert sorted(traced.parameter_of.values()) == sorted(traced.parameters)
    marked = {node.target for node in traced.forward_of.values()}
    assert {aten.addmm.default, aten.tanh.default} <= marked
    keys = {node.args[1] for node in calls(traced, MARK)}
    assert keys <= traced.forward_of.keys() | traced.parameter_of.keys()


def test_a_frozen_parameter_has_no_gradient():
    net = Net()
    net.fc2.weight.requires_grad_(False)
    traced = trace_of(net, X, training=True)
    assert traced.gradients == ["fc1.weight", "fc1.bias", "fc2.bias"]


def test_a_parameter_without_influence_has_no_gradient():
    net = Net()
    net.spare = nn.Linear(2, 2)
    traced = trace_of(net, X, training=True)
    assert "spare.weight" in traced.parameters
    assert "spare.weight" not in traced.gradients


@pytest.mark.parametrize("cut", ["no_grad", "detach"])
def test_no_grad_and_detach(cut):
    class Cut(Net):
        def forward(self, x):
            if cut == "no_grad":
                with torch.no_grad():
                    x = self.fc1(x)
            else:
                x = self.fc1(x).detach()
            return poptorch.identity_loss(self.fc2(x), "sum")

    assert trace_of(Cut(), X, training=True).gradients == ["fc2.weight", "fc2.bias"]


def test_inputs_get_no_gradient():
    traced = trace_of(Net(), X, training=True)
    assert not any(node.op == "placeholder" for node in traced.forward_of.values())


def test_a_custom_autograd_function():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    class Custom(Net):
        def forward(self, x):
            return poptorch.identity_loss(Doubled.apply(self.fc1(x)), "sum")

    assert trace_of(Custom(), X, training=True).gradients == ["fc1.weight", "fc1.bias"]


def test_checkpointing_of_torch():
    class Checkpointed(Net):
        def forward(self, x):
            x = torch.utils.checkpoint.checkpoint(self.fc1, x, use_reentrant=False)
            return poptorch.identity_loss(self.fc2(x), "sum")

    traced = trace_of(Checkpointed(), X, training=True)
    assert traced.gradients == list(traced.parameters)


# Prints


def test_prints_are_noted():
    class Prints(Net):
        def forward(self, x):
            x = poptorch.ipu_print_tensor(self.fc1(x), "here", digits=2)
            return poptorch.identity_loss(self.fc2(x), "sum")

    traced = trace_of(Prints(), X, training=True)
    requests = [traced.prints[node.args[1]] for node in calls(traced, PRINT)]
    assert [request.title for request in requests] == ["here", "here"]
    assert [origin_of(node).backward for node in calls(traced, PRINT)] == [False, True]
    assert requests[0].text_format.digits == 2


# What tracing leaves behind


def test_the_module_is_as_before():
    net = Net()
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    trace_of(net, X, training=True)
    after = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    assert list(after) == list(tensors)
    for name, tensor in after.items():
        assert tensor is tensors[name]
        assert torch.equal(tensor, values[name])
        assert tensor.grad is None


@pytest.mark.parametrize("shared", ["module", "weight", "buffer"])
def test_a_shared_part_is_as_before(shared):
    net = Net()
    net.again = nn.Linear(4, 5)
    if shared == "module":
        net.again = net.fc1
    elif shared == "weight":
        net.again.weight = net.fc1.weight
    else:
        net.again.register_buffer("shift", net.shift)
    before = [(n, id(p)) for n, p in net.named_parameters(remove_duplicate=False)]
    buffers = [(n, id(b)) for n, b in net.named_buffers(remove_duplicate=False)]
    trace_of(net, X, training=True)
    assert [(n, id(p)) for n, p in net.named_parameters(remove_duplicate=False)] == before
    assert [(n, id(b)) for n, b in net.named_buffers(remove_duplicate=False)] == buffers


def test_the_module_is_as_before_when_forward_fails():
    class Fails(Net):
        def forward(self, x):
            super().forward(x)
            raise KeyError("ours")

    net = Fails()
    parameters = dict(net.named_parameters())
    with pytest.raises(KeyError, match="ours"):
        trace_of(net, X, training=True)
    assert all(parameter is parameters[n] for n, parameter in net.named_parameters())


def test_torch_is_as_before():
    saved = F.has_torch_function, F.has_torch_function_unary, torch.is_grad_enabled()
    with pytest.raises(ZeroDivisionError):
        trace_of(Function(lambda x: x * (1 / 0)), X)
    trace_of(Net(), X, training=True)
    assert saved == (F.has_torch_function, F.has_torch_function_unary, torch.is_grad_enabled())
    assert not torch.overrides._get_current_function_mode_stack()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert float(torch.ones(3).sum()) == 3.0


def test_hooks_of_modules_run_while_tracing_only():
    net = Net()
    seen = []
    net.fc1.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    traced = trace_of(net, X)
    assert seen == [(2, 5)]
    assert torch.nn.modules.module._global_forward_hooks == {}
    assert torch.nn.modules.module._global_forward_pre_hooks == {}
    assert traced.num_outputs == 2


def test_a_tensor_of_an_earlier_trace():
    """It has no value: better an error than zeros."""
    kept = []

    def function(x):
        if not kept:
            kept.append(x * 2)
        return x + kept[0]

    trace_of(Function(function), X)
    with pytest.raises(Error):
        trace_of(Function(function), X)


def test_attributes_that_forward_sets_to_tensors_are_put_back():
    class Stores(Net):
        def __init__(self):
            super().__init__()
            self.seen = None

        def forward(self, x):
            self.seen = self.fc1(x)
            self.fc1.extra = [self.seen]
            self.count = 3
            return super().forward(x)

    net = Stores()
    trace_of(net, X)
    assert net.seen is None
    assert not hasattr(net.fc1, "extra")
    assert net.count == 3


def test_random_numbers_of_the_host_are_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    trace_of(Function(lambda x: x + torch.randn(4)), X)
    assert torch.equal(torch.rand(2), expected)


class Failing(Net):
    def forward(self, x):
        super().forward(x)
        raise KeyError("ours")


@pytest.mark.parametrize("kind", [Net, Failing])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_trace_keeps_no_parameter_alive(kind, training):
    def trace_once():
        net = kind()
        with contextlib.suppress(KeyError):
            trace_of(net, X, training=training)
        return [weakref.ref(parameter) for parameter in net.parameters()]

    alive = trace_once()
    gc.collect()
    assert [reference() for reference in alive] == [None] * 4


def test_tracing_inside_of_no_grad():
    with torch.no_grad():
        traced = trace_of(Net(), X, training=True)
    assert traced.gradients == list(traced.parameters)


def test_tracing_twice_gives_the_same_graph():
    net = Net()
    one, two = (trace_of(net, X, training=True) for _ in range(2))
    assert str(one.graph_module.graph) == str(two.graph_module.graph)


def test_a_lazy_module():
    with pytest.raises(Error, match="lazy"):
        check_traceable(nn.LazyLinear(3))
