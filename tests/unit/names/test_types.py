"""The operation's type in the names of its results."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch
from tests.unit.names.common import Function, inference_names_of, make_options, names_of

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
        (lambda: nn.Linear(4, 2), (4,), "Add:0"),
        (lambda: nn.Linear(4, 2), (3, 2, 4), "Add:0"),
        (lambda: nn.Linear(4, 2, bias=False), (4,), "MatMul:0"),
        (lambda: nn.Linear(4, 2, bias=False), (5, 3, 2, 4), "MatMul:0"),
    ],
)
def test_layer_types(kind, shape, name):
    net = nn.Module()
    net.layer = kind()
    net.forward = lambda x: net.layer(x)
    assert f"layer/{name}" in inference_names_of(net, torch.randn(shape))


@pytest.mark.parametrize(
    "cut, names",
    [
        (lambda x: x.split(1), ["Slice:0", "Slice:0/1"]),
        (lambda x: x.split([1, 2], 1), ["Slice:0", "Slice:0/1"]),
        (lambda x: x.chunk(3, 1), ["Slice:0", "Slice:0/1", "Slice:0/2"]),
        (lambda x: x.unbind(), ["Squeeze:0", "Squeeze:0/1"]),
        (lambda x: x.narrow(1, 0, 2), ["Slice:0"]),
    ],
)
def test_every_piece_has_a_name_of_its_own(cut, names):
    x, options = torch.randn(2, 3), make_options()
    for name in names:
        options.anchorTensor(name, name)
    model = poptorch.inferenceModel(Function(cut), options)
    model(x)
    assert [name for name in model.getTensorNames() if name != "input"] == names
    pieces = cut(x)
    pieces = [pieces] if isinstance(pieces, torch.Tensor) else pieces
    for name, piece in zip(names, pieces, strict=True):
        assert torch.equal(model.getAnchoredTensor(name), piece)


PRODUCTS = {
    "of matrices": (lambda x: x[0, 0] @ x[0, 1], (2, 2, 4, 4)),
    "of a vector": (lambda x: x[0, 0, 0] @ x[0, 1], (2, 2, 4, 4)),
    "with a vector": (lambda x: x @ x[0, 0, 0], (2, 2, 4, 4)),
    "of rank 4": (lambda x: x @ x, (2, 3, 4, 4)),
    "of ranks 4 and 2": (lambda x: x @ x[0, 0], (2, 3, 4, 4)),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_a_product_of_any_rank_is_one_tensor(case):
    function, shape = PRODUCTS[case]
    names = inference_names_of(Function(function), torch.randn(shape))
    assert "MatMul:0" in names
    assert not any(name.startswith(("Reshape", "Expand", "Unsqueeze", "Squeeze")) for name in names)


def test_reshapes_of_the_users_own_have_names():
    net = Function(lambda x: F.linear(x.reshape(-1, 4), x[0]).reshape(3, 2, 2))
    names = inference_names_of(net, torch.randn(3, 2, 4))
    assert {"Reshape:0", "MatMul:0", "Reshape:0/1"} <= set(names)


@pytest.mark.parametrize("bias, name", [(True, "Add:0"), (False, "MatMul:0")])
def test_a_layer_of_rank_3_is_anchored_by_one_name(bias, name):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 2, bias=bias)

        def forward(self, x):
            out = self.fc(x)
            return out, poptorch.identity_loss(out.square(), "sum")

    net, options = Net(), make_options()
    options.anchorTensor("out", f"fc/{name}")
    options.anchorTensor("gradient", f"Gradient___fc/{name}")
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
    model = poptorch.trainingModel(net, options, optimizer)
    out, _ = model(torch.randn(3, 5, 4))
    assert out.shape == (3, 5, 2)
    assert torch.equal(model.getAnchoredTensor("out"), out)
    torch.testing.assert_close(model.getAnchoredTensor("gradient"), 2 * out)


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


LOSSES = {
    "cross entropy": lambda x, y: F.cross_entropy(x, y),
    "nll": lambda x, y: F.nll_loss(x, y),
    "mean squared error": lambda x, y: F.mse_loss(x, x.detach() * 2),
    "absolute error": lambda x, y: F.l1_loss(x, x.detach() * 2),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_is_an_identity_loss_too(case):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x, y):
            with poptorch.NameScope("end"):
                return LOSSES[case](self.fc(x), y)

    net, options = Net(), make_options()
    options.anchorTensor("loss", "end/IdentityLoss:0")
    options.anchorTensor("seed", "Gradient___end/IdentityLoss:0")
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1, loss_scaling=8.0)
    model = poptorch.trainingModel(net, options, optimizer)
    loss = model(torch.randn(2, 4), torch.tensor([0, 2]))
    assert torch.equal(model.getAnchoredTensor("loss"), loss)
    assert model.getAnchoredTensor("seed").item() == 8.0
    assert [n for n in model.getTensorNames() if n.startswith("end/IdentityLoss")] == [
        "end/IdentityLoss:0"
    ]
