"""Names of the compiled graph's tensors: what ``getTensorNames`` lists and anchors look up."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch


def make_options(d=1, ga=1):
    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    options.deviceIterations(d)
    options.Training.gradientAccumulation(ga)
    return options


def trained(net, *inputs, options=None, optimizer=None):
    """Return the compiled training executor of a model."""
    optimizer = optimizer or poptorch.optim.SGD(net.parameters(), lr=0.125)
    model = poptorch.trainingModel(net, options or make_options(), optimizer)
    model.compile(*inputs)
    return model


def names_of(net, *inputs, **settings):
    """Return the names of a training graph; checks that none stands there twice."""
    names = trained(net, *inputs, **settings).getTensorNames()
    assert all(type(name) is str for name in names)
    assert len(names) == len(set(names))
    return names


def inference_names_of(net, *inputs, options=None):
    model = poptorch.inferenceModel(net, options or make_options())
    model.compile(*inputs)
    return model.getTensorNames()


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 5)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(5, 3)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y=None):
        x = self.fc2(self.relu(self.fc1(x)))
        return x if y is None else (x, self.loss(x, y))


def batch(size=6):
    return torch.randn(size, 4), torch.randint(0, 3, (size,))


# Whole models

MLP_FORWARD = {
    "input",
    "fc1.weight",
    "fc1.bias",
    "fc2.weight",
    "fc2.bias",
    "fc1/Gemm:0",
    "relu/Relu:0",
    "fc2/Gemm:0",
}
MLP_TRAINED = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")


def test_an_mlp_in_inference():
    names = inference_names_of(Mlp(), batch()[0])
    assert set(names) >= MLP_FORWARD
    assert "input/1" not in names
    assert not any("___" in name for name in names)


def test_an_mlp_in_training():
    names = set(names_of(Mlp(), *batch()))
    assert names >= MLP_FORWARD | {"input/1", "loss/LogSoftmax:0", "loss/Nll:0"}
    for name in MLP_TRAINED:
        assert f"Gradient___{name}" in names
        assert f"UpdatedVar___{name}" in names
        assert f"scaledLearningRate0___specific___{name}" in names
        assert f"weightDecayScaleFactor0___specific___{name}" in names
    for name in ("fc1/Gemm:0", "relu/Relu:0", "fc2/Gemm:0", "loss/LogSoftmax:0", "loss/Nll:0"):
        assert f"Gradient___{name}" in names


def test_what_has_no_gradient_has_no_gradient_name():
    names = names_of(Mlp(), *batch())
    assert "Gradient___input" not in names
    assert "Gradient___input/1" not in names
    assert not any(name.startswith("Gradient___Gradient___") for name in names)
    assert not any(name.startswith("Accum___") for name in names)


def test_parameters_have_the_names_of_named_parameters():
    net = Mlp()
    names = names_of(net, *batch())
    assert [n for n in names if n in dict(net.named_parameters())] == list(MLP_TRAINED)


def test_the_same_forward_names_in_training_and_inference():
    net = Mlp()
    forward = inference_names_of(net, *batch())
    assert set(forward) <= set(names_of(net, *batch()))


def test_names_do_not_depend_on_what_was_compiled_before():
    first = names_of(Mlp(), *batch())
    inference_names_of(Mlp(), batch()[0])
    assert names_of(Mlp(), *batch()) == first


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2, 3)

    def forward(self, x, y):
        x = self.fc(self.pool(self.layer1(x)).flatten(1))
        return x, F.nll_loss(F.log_softmax(x, 1), y)


def test_a_cnn():
    names = set(names_of(Cnn(), torch.randn(2, 1, 8, 8), torch.tensor([0, 2])))
    assert names >= {
        "layer1.0.0.weight",
        "layer1.0.1.running_mean",
        "layer1.0.1.running_var",
        "layer1/0/0/Conv:0",
        "layer1/0/1/BatchNormalization:0",
        "layer1/1/Relu:0",
        "layer1/2/MaxPool:0",
        "fc/Gemm:0",
        "Nll:0",
        "Gradient___layer1.0.0.weight",
        "Gradient___layer1.0.1.bias",
        "Gradient___layer1/1/Relu:0",
        "UpdatedVar___layer1.0.1.weight",
    }
    assert any(name.startswith("pool/") for name in names)
    assert "layer1.0.1.num_batches_tracked" not in names
    assert "UpdatedVar___layer1.0.1.running_mean" not in names


# Types

TYPES = {
    "Add:0": lambda x: x + x,
    "Sub:0": lambda x: x - x,
    "Mul:0": lambda x: x * x,
    "Div:0": lambda x: x / x,
    "Pow:0": lambda x: x**2,
    "Neg:0": lambda x: -x,
    "Exp:0": lambda x: x.exp(),
    "Log:0": lambda x: x.log(),
    "Sqrt:0": lambda x: x.sqrt(),
    "Tanh:0": lambda x: x.tanh(),
    "Sigmoid:0": lambda x: x.sigmoid(),
    "Abs:0": lambda x: x.abs(),
    "Clip:0": lambda x: x.clamp(0, 1),
    "MatMul:0": lambda x: x @ x.t(),
    "Relu:0": lambda x: x.relu(),
    "Gelu:0": lambda x: F.gelu(x),
    "LeakyRelu:0": lambda x: F.leaky_relu(x),
    "Softmax:0": lambda x: x.softmax(1),
    "LogSoftmax:0": lambda x: x.log_softmax(1),
    "Reshape:0": lambda x: x.reshape(-1),
    "Transpose:0": lambda x: x.permute(1, 0),
    "Concat:0": lambda x: torch.cat([x, x]),
    "Split:0": lambda x: x.split(1)[0],
    "Slice:0": lambda x: x[:1],
    "Expand:0": lambda x: x[:, :1].expand(2, 5),
    "Gather:0": lambda x: x.index_select(0, torch.tensor([1])),
    "ReduceSum:0": lambda x: x.sum(),
    "ReduceMean:0": lambda x: x.mean(),
    "ReduceMax:0": lambda x: x.amax(1),
    "ArgMax:0": lambda x: x.argmax(1),
    "TopK:0": lambda x: x.topk(1)[0],
    "Cast:0": lambda x: x.half(),
    "Where:0": lambda x: torch.where(x > 0, x, x),
    "Equal:0": lambda x: x == x,
    "Less:0": lambda x: x < x,
    "Greater:0": lambda x: x > x,
    "PrintTensor:0": lambda x: poptorch.ipu_print_tensor(x),
}


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, *args):
        return self._function(*args)


@pytest.mark.parametrize("name", TYPES)
def test_op_types_are_the_back_ends(name):
    assert name in inference_names_of(Function(TYPES[name]), torch.ones(2, 3))


@pytest.mark.parametrize(
    "kind, shape, name",
    [
        (lambda: nn.ConvTranspose2d(1, 1, 3), (1, 1, 5, 5), "ConvTranspose:0"),
        (lambda: nn.Conv1d(1, 1, 3), (1, 1, 5), "Conv:0"),
        (lambda: nn.AvgPool2d(2), (1, 1, 4, 4), "AveragePool:0"),
        (lambda: nn.MaxPool2d(2), (1, 1, 4, 4), "MaxPool:0"),
        (lambda: nn.LayerNorm(4), (2, 4), "GroupNormalization:0"),
        (lambda: nn.GroupNorm(1, 2), (1, 2, 4), "GroupNormalization:0"),
        (lambda: nn.BatchNorm1d(4), (2, 4), "BatchNormalization:0"),
        (lambda: nn.Linear(4, 2), (2, 4), "Gemm:0"),
        (lambda: nn.Linear(4, 2, bias=False), (2, 4), "MatMul:0"),
    ],
)
def test_layer_types(kind, shape, name):
    net = nn.Module()
    net.layer = kind()
    net.forward = lambda x: net.layer(x)
    assert f"layer/{name}" in inference_names_of(net, torch.randn(shape))


def test_embedding_is_a_gather():
    class Embeds(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 3)

        def forward(self, x):
            return self.table(x)

    names = inference_names_of(Embeds(), torch.tensor([1, 2]))
    assert {"table.weight", "table/Gather:0"} <= set(names)


def test_identity_loss():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x):
            with poptorch.NameScope("end"):
                return poptorch.identity_loss(self.w * x, "mean")

    names = names_of(Loss(), torch.ones(1, 2))
    assert "end/IdentityLoss:0" in names
    assert "Gradient___end/IdentityLoss:0" in names


# Inputs


def test_inputs_in_flattened_order():
    class Nested(nn.Module):
        def forward(self, first, pair, mapping, flag=True):
            return first + pair[0] + pair[1] + mapping["k"]

    options = make_options()
    for position, name in enumerate(["input", "input/1", "input/2", "input/3"]):
        options.anchorTensor(str(position), name)
    model = poptorch.inferenceModel(Nested(), options)
    values = [torch.full((2,), float(i)) for i in range(4)]
    model(values[0], (values[1], values[2]), {"k": values[3]})
    assert [n for n in model.getTensorNames() if n.startswith("input")] == [
        "input",
        "input/1",
        "input/2",
        "input/3",
    ]
    for position in range(4):
        assert torch.equal(model.getAnchoredTensor(str(position)), values[position])


def test_an_unused_input_has_a_name():
    class Ignores(nn.Module):
        def forward(self, x, y):
            return x + 1

    assert "input/1" in inference_names_of(Ignores(), torch.ones(2), torch.ones(2))


def test_a_parameter_called_input():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.input = nn.Parameter(torch.full((2,), 7.0))

        def forward(self, a, b):
            return a + b + self.input

    inputs = torch.full((2,), 1.0), torch.full((2,), 2.0)
    names = [n for n in inference_names_of(Odd(), *inputs) if n.startswith("input")]
    options = make_options()
    for name in names:
        options.anchorTensor(name, name)
    model = poptorch.inferenceModel(Odd(), options)
    model(*inputs)
    assert {float(model.getAnchoredTensor(name)[0]) for name in names} == {7.0, 1.0, 2.0}


# Clashes and scopes


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
    assert {"Split:0", "Split:1", "Reshape:0", "Mul:0", "Mul:0/1"} <= set(names[0])
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


# Shared and unused parameters


def test_a_module_called_twice_has_one_set_of_parameters():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.l1 = nn.Linear(4, 4)
            self.again = self.l1

        def forward(self, x):
            return poptorch.identity_loss(self.again(self.l1(x)), "sum")

    names = names_of(Shared(), torch.ones(2, 4))
    assert "l1.weight" in names
    assert "again.weight" not in names
    assert sum(name.startswith("UpdatedVar___") for name in names) == 2
    assert {"l1/Gemm:0", "l1/Gemm:0/1"} <= set(names)


def test_a_shared_module_keeps_its_weights_on_the_host():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.l1 = nn.Linear(4, 4)
            self.again = self.l1

        def forward(self, x):
            return self.again(self.l1(x))

    net = Shared()
    before = net.l1.weight
    inference_names_of(net, torch.ones(2, 4))
    assert net.l1.weight is before
    assert net.again is net.l1
    assert type(before) is nn.Parameter


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.out = nn.Linear(4, 4, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return poptorch.identity_loss(self.out(torch.tanh(self.embed(x))), "sum")


def test_a_tied_weight_has_the_first_name():
    net = Tied()
    names = names_of(net, torch.ones(2, 4))
    assert "embed.weight" in names
    assert "Gradient___embed.weight" in names
    assert not any("out.weight" in name for name in names)
    assert net.out.weight is net.embed.weight


def test_the_gradient_of_a_tied_weight_is_the_sum_of_its_uses():
    net = Tied()
    twin = Tied()
    twin.load_state_dict(net.state_dict())
    options = make_options()
    options.anchorTensor("g", "Gradient___embed.weight")
    x = torch.randn(2, 4)
    model = trained(net, x, options=options)
    model(x)
    twin(x).backward()
    expected = twin.embed.weight.grad
    torch.testing.assert_close(model.getAnchoredTensor("g"), expected, rtol=1e-5, atol=1e-6)


def test_unused_parameters_are_absent():
    class Unused(Mlp):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(2, 2)
            self.register_buffer("note", torch.ones(3))

    net = Unused()
    before = net.spare.weight.detach().clone()
    model = trained(net, *batch())
    assert not any("spare" in name or "note" in name for name in model.getTensorNames())
    model(*batch())
    assert torch.equal(net.spare.weight, before)


def test_a_frozen_parameter_has_neither_gradient_nor_update():
    net = Mlp()
    net.fc1.weight.requires_grad_(False)
    names = names_of(net, *batch())
    assert "fc1.weight" in names
    assert not any("___fc1.weight" in name for name in names)
    assert "Gradient___fc1.bias" in names


def test_a_parameter_behind_detach_is_not_updated():
    class Detached(Mlp):
        def forward(self, x, y):
            x = self.fc2(self.relu(self.fc1(x)).detach())
            return x, self.loss(x, y)

    names = names_of(Detached(), *batch())
    assert "fc1.weight" in names
    assert not any("___fc1" in name for name in names)
    assert "UpdatedVar___fc2.weight" in names


def test_integer_buffers_are_constants():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("index", torch.tensor([1, 0]))

        def forward(self, x):
            return x[:, self.index]

    names = inference_names_of(Table(), torch.ones(2, 2))
    assert "index" not in names


def test_captured_tensors_are_constants():
    class Captures(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.tensor([1.0, 2.0])
            self.l1 = Function(lambda x: x + torch.tensor([3.0]))

        def forward(self, x):
            return self.l1(x + self.table)

    names = inference_names_of(Captures(), torch.ones(2, 2))
    assert "Constant:0" in names
    assert "l1/Constant:0" in names


# Names of training


def test_accumulators_exist_with_gradient_accumulation_only():
    with_accumulation = names_of(Mlp(), *batch(), options=make_options(1, 2))
    assert {"Accum___fc1.weight", "UpdatedVar___Accum___fc1.weight"} <= set(with_accumulation)
    assert not any("Accum___" in name for name in names_of(Mlp(), *batch()))


@pytest.mark.parametrize("ga", [1, 2])
@pytest.mark.parametrize(
    "make, states",
    [
        (lambda p: poptorch.optim.SGD(p, lr=0.1), []),
        (lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9), ["Accl"]),
        (
            lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9, use_combined_accum=True),
            ["Accl"],
        ),
        (lambda p: poptorch.optim.Adam(p, lr=0.1), ["Accl1", "Accl2", "Step"]),
        (lambda p: poptorch.optim.AdamW(p, lr=0.1), ["Accl1", "Accl2", "Step"]),
        (lambda p: poptorch.optim.RMSprop(p, lr=0.1), ["Accl1"]),
        (lambda p: poptorch.optim.RMSprop(p, lr=0.1, momentum=0.9), ["Accl1", "Accl2"]),
        (
            lambda p: poptorch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
            ["Accl1", "Accl2", "Accl3"],
        ),
        (lambda p: poptorch.optim.LAMB(p, lr=0.1), ["Accl1", "Accl2", "Step"]),
    ],
    ids=[
        "SGD",
        "momentum",
        "combined",
        "Adam",
        "AdamW",
        "RMSprop",
        "RMSprop+momentum",
        "centered",
        "LAMB",
    ],
)
def test_optimizer_state(make, states, ga):
    net = Mlp()
    names = names_of(net, *batch(), options=make_options(1, ga), optimizer=make(net.parameters()))
    known = {"Accl", "Accl1", "Accl2", "Accl3", "Step"}
    for weight in MLP_TRAINED:
        found = {n.split("___")[0] for n in names if n.endswith(f"___{weight}")} & known
        assert found == set(states)


SCALARS = [
    (lambda p: poptorch.optim.SGD(p, lr=0.1), {"scaledLearningRate0", "weightDecayScaleFactor0"}),
    (lambda p: torch.optim.SGD(p, lr=0.1), {"scaledLearningRate0", "weightDecayScaleFactor0"}),
    (
        lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.5),
        {"scaledLearningRate2", "scaledMomentum2"},
    ),
    (lambda p: poptorch.optim.Adam(p), set()),
    (lambda p: poptorch.optim.Adam(p, lr=0.1), {"learningRate"}),
    (lambda p: torch.optim.Adam(p), {"learningRate"}),
    (lambda p: poptorch.optim.Adam(p, betas=(0.5, 0.5)), {"adamBeta1", "adamBeta2"}),
    (lambda p: poptorch.optim.Adam(p, eps=1e-3), {"adamEps"}),
    (lambda p: poptorch.optim.Adam(p, weight_decay=0.1), {"weightDecay"}),
    (lambda p: poptorch.optim.Adam(p, loss_scaling=2.0), {"adamGradientScaling"}),
    (
        lambda p: poptorch.optim.RMSprop(p, lr=0.1, alpha=0.5, eps=1e-3, momentum=0.5),
        {"learningRate", "adaptiveAlpha", "adaptiveEps", "adaptiveMomentum"},
    ),
]


@pytest.mark.parametrize("make, prefixes", SCALARS)
def test_only_variable_scalars_have_names(make, prefixes):
    net = Mlp()
    names = names_of(net, *batch(), optimizer=make(net.parameters()))
    found = {name.split("___specific___")[0] for name in names if "___specific___" in name}
    assert found == prefixes
    for prefix in prefixes:
        assert f"{prefix}___specific___fc2.bias" in names


@pytest.mark.parametrize("scaling, listed", [(None, False), (1.0, True), (8.0, True)])
def test_the_loss_scale_has_a_name_when_it_is_variable(scaling, listed):
    net = Mlp()
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1, loss_scaling=scaling)
    assert ("lossScaling_FLOAT" in names_of(net, *batch(), optimizer=optimizer)) == listed


def test_a_parameter_in_no_group_uses_the_defaults():
    net = Mlp()
    optimizer = poptorch.optim.SGD([net.fc1.weight], lr=0.1)
    names = names_of(net, *batch(), optimizer=optimizer)
    assert "scaledLearningRate0___specific___fc1.weight" in names
    assert "scaledLearningRate0___specific___fc1.bias" not in names
    assert "scaledLearningRate0___default___FLOAT" in names


# Both forms of names


@pytest.mark.parametrize("old", [True, False], ids=["with model.", "without"])
@pytest.mark.parametrize(
    "name",
    [
        "{}fc1.weight",
        "Gradient___{}fc1.weight",
        "UpdatedVar___{}fc2.bias",
        "Accum___{}fc1.bias",
        "scaledLearningRate0___specific___{}fc1.weight",
    ],
)
def test_anchors_find_names_of_older_releases(name, old):
    options = make_options(1, 2)
    options.anchorTensor("old", name.format("model." if old else ""), poptorch.OutputMode.All)
    options.anchorTensor("new", name.format(""), poptorch.OutputMode.All)
    model = trained(Mlp(), *batch(), options=options)
    model(*batch())
    assert torch.equal(model.getAnchoredTensor("old"), model.getAnchoredTensor("new"))
    assert not any("model." in n for n in model.getTensorNames())


class Wrapped(nn.Module):
    """A user's own wrapper: its parameters really are called ``model.``."""

    def __init__(self):
        super().__init__()
        self.model = Mlp()

    def forward(self, x, y):
        return self.model(x, y)


@pytest.mark.parametrize("prefix", ["model.", "", "model.model."])
def test_anchors_add_and_remove_the_prefix(prefix):
    options = make_options()
    options.anchorTensor("it", f"Gradient___{prefix}fc1.weight")
    options.anchorTensor("exact", "Gradient___model.fc1.weight")
    model = trained(Wrapped(), *batch(), options=options)
    assert "Gradient___model.fc1.weight" in model.getTensorNames()
    assert "model/fc1/Gemm:0" in model.getTensorNames()
    model(*batch())
    assert torch.equal(model.getAnchoredTensor("it"), model.getAnchoredTensor("exact"))


def test_a_name_as_written_comes_first():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.model = nn.Module()
            self.model.fc = nn.Linear(2, 2)

        def forward(self, x):
            return self.model.fc(self.fc(x))

    net = Both()
    options = make_options()
    options.anchorTensor("outer", "fc.weight")
    options.anchorTensor("inner", "model.fc.weight")
    model = poptorch.inferenceModel(net, options)
    model(torch.ones(1, 2))
    assert torch.equal(model.getAnchoredTensor("outer"), net.fc.weight)
    assert torch.equal(model.getAnchoredTensor("inner"), net.model.fc.weight)


def test_an_anchor_keeps_an_unused_result_alive():
    def function(x):
        with poptorch.NameScope("aside"):
            x.exp()
        return x + 1

    assert "aside/Exp:0" not in inference_names_of(Function(function), torch.ones(2))
    options = make_options()
    options.anchorTensor("it", "aside/Exp:0")
    model = poptorch.inferenceModel(Function(function), options)
    x = torch.tensor([0.0, 1.0])
    model(x)
    torch.testing.assert_close(model.getAnchoredTensor("it"), x.exp())


def test_the_list_is_the_callers_own():
    model = trained(Mlp(), *batch())
    names = model.getTensorNames()
    names.clear()
    assert "fc1.weight" in model.getTensorNames()


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_names_that_utf8_cannot_express(training):
    """As from ``os.fsdecode`` of a file name; the device shows them escaped."""
    name = "layer\udcff"

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module(name, nn.Linear(4, 3))
            self.register_buffer(f"{name}_scale", torch.tensor(2.0))

        def forward(self, x):
            y = self._modules[name](x) * self._buffers[f"{name}_scale"]
            return y, poptorch.identity_loss(y, "sum")

    net, x = Odd(), torch.randn(2, 4)
    expected = net(x)[0].detach()
    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    options.anchorTensor("out", f"{name}/Gemm:0")
    model = (
        poptorch.trainingModel(net, options) if training else poptorch.inferenceModel(net, options)
    )
    torch.testing.assert_close(model(x)[0], expected)
    torch.testing.assert_close(model.getAnchoredTensor("out"), expected / 2)
    assert f"{name}.weight" in model.getTensorNames()
