"""``custom_op`` in models: values, gradients and updates are those of eager PyTorch."""

import copy

import pytest
import torch
import torch.nn.functional as F

import popsim_torch as poptorch
from tests.custom_ops import library
from tests.custom_ops.library import DOMAIN
from tests.options import make_options


@pytest.fixture(autouse=True, scope="module")
def loaded_library():
    library.loaded()


@poptorch.register_custom_op("Power", domain=DOMAIN)
def power(x, exponent=2.0):
    return x**exponent


@power.shapes
def _(x, exponent=2.0):
    return torch.empty_like(x)


@power.gradient
def _(x, y, gradient, exponent=2.0):
    return exponent * x ** (exponent - 1) * gradient


class Net(torch.nn.Module):
    """Two layers with something in between; outside of the device that is its eager form."""

    def __init__(self, on_device, eager, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(4, 5).to(dtype)
        self.last = torch.nn.Linear(5, 2).to(dtype)
        self.on_device = on_device
        self.eager = eager

    def forward(self, x, target):
        between = self.on_device if poptorch.isRunningOnIpu() else self.eager
        y = self.last(between(self.first(x)))
        return y, F.mse_loss(y.float(), target)


def custom(name, version=1, **attributes):
    def call(x):
        return poptorch.custom_op([x], name, DOMAIN, version, [x], attributes=attributes)[0]

    return call


def scaled_rows(x):
    factors = torch.tensor([2, -1, 3], dtype=torch.int32)
    y, doubled, sums = poptorch.custom_op(
        [x, factors],
        *("ScaledRows", DOMAIN, 2),
        [x, torch.empty(3, dtype=torch.int32), torch.empty(3)],
    )
    return y + doubled[:, None] * sums[:, None]


def scaled_rows_eager(x):
    factors = torch.tensor([2, -1, 3])
    return factors[:, None] * x + 2 * factors[:, None] * x.sum(1, keepdim=True)


CASES = {
    "in C++": (custom("Cube", scale=0.5), lambda x: 0.5 * x**3),
    "in Python": (custom("Power", exponent=3.0), lambda x: x**3),
    "several outputs, one without gradient": (scaled_rows, scaled_rows_eager),
    "an output that nobody reads": (
        lambda x: poptorch.custom_op(
            [x, torch.tensor([2, -1, 3])],  # int64, which is int32 on the device
            *("ScaledRows", DOMAIN, 2),
            [x, torch.empty(3, dtype=torch.int32), torch.empty(3)],
        )[0],
        lambda x: torch.tensor([2, -1, 3])[:, None] * x,
    ),
    "twice": (
        lambda x: custom("Cube")(custom("Cube", scale=2.0)(x)),
        lambda x: (2 * x**3) ** 3,
    ),
    "of a transposed tensor": (
        lambda x: custom("Cube")(x.t()).t(),
        lambda x: x**3,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_training(case):
    net = Net(*CASES[case])
    x, target = torch.randn(3, 4), torch.randn(3, 2)
    eager = copy.deepcopy(net)
    y, loss = eager(x, target)
    loss.backward()
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter -= 0.1 * parameter.grad
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
    training = poptorch.trainingModel(net, make_options(), optimizer)
    found = training(x, target)
    torch.testing.assert_close(found, (y, loss))
    training.copyWeightsToHost()
    for ours, theirs in zip(net.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["Cube", "Power"])
def test_training_in_half_precision(name):
    attributes = {} if name == "Cube" else {"exponent": 3.0}
    net = Net(custom(name, **attributes), lambda x: x**3, torch.float16)
    x, target = torch.randn(3, 4).half(), torch.randn(3, 2)
    eager = copy.deepcopy(net)
    y, loss = eager(x, target)
    loss.backward()
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
    training = poptorch.trainingModel(net, make_options(), optimizer)
    found = training(x, target)
    torch.testing.assert_close(found, (y, loss), rtol=4e-3, atol=4e-3)
    training.copyWeightsToHost()
    for ours, theirs in zip(net.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs - 0.1 * theirs.grad, rtol=4e-3, atol=4e-3)


def test_every_micro_batch_is_computed():
    net = Net(custom("Cube"), lambda x: x**3)
    x, target = torch.randn(12, 4), torch.randn(12, 2)
    options = make_options(2, 2).outputMode(poptorch.OutputMode.All)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.0)
    y, _ = poptorch.trainingModel(net, options, optimizer)(x, target)
    torch.testing.assert_close(y, net(x, target)[0])


def test_gradients_have_names():
    net = Net(custom("Cube"), lambda x: x**3)
    options = make_options()
    options.anchorTensor("of x", "Gradient___first/Gemm:0")
    options.anchorTensor("of y", "Gradient___Cube:0")
    options.anchorTensor("x", "first/Gemm:0")
    training = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.1))
    training(torch.randn(3, 4), torch.randn(3, 2))
    x, of_x, of_y = (training.getAnchoredTensor(name) for name in ("x", "of x", "of y"))
    torch.testing.assert_close(of_x, 3 * x**2 * of_y)


def test_what_needs_no_gradient_needs_no_gradient_of_the_operator():
    net = Net(custom("CubeWithoutGradient"), lambda x: x**3)
    net.first.requires_grad_(False)
    x, target = torch.randn(3, 4), torch.randn(3, 2)
    expected = net(x, target)
    optimizer = poptorch.optim.SGD(net.last.parameters(), lr=0.1)
    training = poptorch.trainingModel(net, make_options(), optimizer)
    torch.testing.assert_close(training(x, target), expected)


def test_stages_and_recomputation_change_nothing():
    class Staged(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(5)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

        def forward(self, x, target):
            for i, layer in enumerate(self.layers):
                with poptorch.Block(f"{i}", ipu_id=i):
                    x = torch.tanh(custom("Power")(custom("Cube")(layer(x))))
                    if i == 1:
                        return x, F.mse_loss(x, target)

    x, target = torch.randn(2, 8, 4)
    results = []
    for stages in (1, 2):
        options = make_options(1, 4).outputMode(poptorch.OutputMode.All)
        options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Mean)
        if stages == 2:
            options.setExecutionStrategy(
                poptorch.PipelinedExecution(*(poptorch.Stage(f"{i}").ipu(i) for i in range(2)))
            )
        else:
            options.setExecutionStrategy(
                poptorch.ShardedExecution(*(poptorch.Stage(f"{i}").ipu(i) for i in range(2)))
            )
        net = Staged()
        optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
        training = poptorch.trainingModel(net, options, optimizer)
        outputs = training(x, target)
        training.copyWeightsToHost()
        results.append([*outputs, *net.parameters()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_outside_of_a_model_results_are_zeros_like_the_examples():
    examples = [torch.full((2, 3), 7.0), torch.ones(4, dtype=torch.int64)]
    found = poptorch.custom_op([torch.ones(1)], "Nobody's", "any", 1, examples)
    assert [(t.dtype, t.shape) for t in found] == [(t.dtype, t.shape) for t in examples]
    assert not any(t.any() for t in found)


# --- Operators that are there ---


class FastGather(torch.nn.Module):
    def __init__(self, index):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2, 3, 5))
        self.index = index

    def forward(self, x):
        data = x * self.weight
        index = self.index.to(x.device)
        if not poptorch.isRunningOnIpu():
            y = torch.gather(data, -1, index.long())
        else:
            y = poptorch.custom_op(
                [data, index],
                "FastGatherLastDim",
                "poptorch.custom_ops",
                1,
                example_outputs=[torch.zeros(index.shape, dtype=data.dtype)],
            )[0]
        return y, poptorch.identity_loss(y.square(), "sum")


def test_fast_gather_trains():
    net = FastGather(torch.randint(0, 5, (2, 3, 7), dtype=torch.int32))
    x = torch.randn(2, 3, 5)
    expected = net(x)
    (gradient,) = torch.autograd.grad(expected[1], net.weight)
    updated = net.weight.detach() - 0.1 * gradient
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
    training = poptorch.trainingModel(net, make_options(), optimizer)
    torch.testing.assert_close(training(x), expected)
    training.copyWeightsToHost()
    torch.testing.assert_close(net.weight.detach(), updated)


def test_fast_gather_in_half_precision():
    net = FastGather(torch.randint(0, 5, (2, 3, 4), dtype=torch.int32)).half()
    x = torch.randn(2, 3, 5).half()
    y, _ = poptorch.inferenceModel(net, make_options())(x)
    assert torch.equal(y, torch.gather(x * net.weight, -1, net.index.long()))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (torch.zeros(2, 4, 5, dtype=torch.int32), "the same sizes but the last"),
        (torch.zeros(2, 5, dtype=torch.int32), "the rank of data"),
        (torch.zeros(2, 3, 5), "an index of int32"),
    ],
)
def test_fast_gather_refuses_an_index_that_does_not_fit(index, message):
    with pytest.raises(poptorch.Error, match=message):
        poptorch.inferenceModel(FastGather(index), make_options())(torch.randn(2, 3, 5))


X, Y = torch.rand(2, 3, 4) + 0.1, torch.rand(2, 3, 4) + 0.2
BUILT_IN = [
    ("Relu", [X - 0.5], {}, lambda x: x.relu()),
    ("LeakyRelu", [X - 0.5], {"alpha": 0.3}, lambda x: F.leaky_relu(x, 0.3)),
    ("LeakyRelu", [X - 0.5], {}, F.leaky_relu),
    ("Elu", [X - 0.5], {"alpha": 2.0}, lambda x: F.elu(x, 2.0)),
    ("Selu", [X - 0.5], {}, F.selu),
    ("Softplus", [X], {}, F.softplus),
    (
        "HardSigmoid",
        [4 * X - 2],
        {"alpha": 0.3, "beta": 0.4},
        lambda x: (0.3 * x + 0.4).clamp(0, 1),
    ),
    ("Erf", [X], {}, torch.erf),
    ("Sin", [X], {}, torch.sin),
    ("Tanh", [X], {}, torch.tanh),
    ("Sigmoid", [X], {}, torch.sigmoid),
    ("Add", [X, Y], {}, torch.add),
    ("Sub", [X, Y], {}, torch.sub),
    ("Mul", [X, Y], {}, torch.mul),
    ("Div", [X, Y], {}, torch.div),
    ("Pow", [X, Y], {}, torch.pow),
    ("Sum", [X, Y, X], {}, lambda *tensors: sum(tensors)),
    ("MatMul", [X, Y.transpose(1, 2)], {}, torch.matmul),
    (
        "Gemm",
        [X[0], Y[0], Y[0, :, :3]],
        {"alpha": 2.0, "transB": 1},
        lambda a, b, c: 2 * a @ b.T + c,
    ),
    ("Where", [X > 0.5, X, Y], {}, torch.where),
    ("Clip", [X], {"min": 0.3, "max": 0.6}, lambda x: x.clamp(0.3, 0.6)),
    ("Less", [X, Y], {}, torch.less),
    ("Softmax", [X], {}, lambda x: x.flatten(1).softmax(1).view_as(x)),
    ("Softmax", [X], {"axis": 2}, lambda x: x.softmax(2)),
    ("LogSoftmax", [X], {"axis": -1}, lambda x: x.log_softmax(2)),
]


@pytest.mark.parametrize(
    ("name", "inputs", "attributes", "expected"),
    [pytest.param(*row, id=f"{row[0]}-{i}") for i, row in enumerate(BUILT_IN)],
)
def test_operators_of_onnx(name, inputs, attributes, expected):
    result = expected(*inputs)
    (found,) = library.run(
        name, *inputs, attributes=attributes, examples=[result], domain="ai.onnx", version=10
    )
    torch.testing.assert_close(found, result)


def test_softmax_of_newer_versions_works_along_one_axis():
    (found,) = library.run("Softmax", X, domain="ai.onnx", version=13)
    torch.testing.assert_close(found, X.softmax(-1))


@pytest.mark.parametrize(
    ("name", "attributes", "expected"),
    [
        ("Gelu", {}, F.gelu),
        ("Scale", {"scale": 3.0}, lambda x: 3 * x),
        ("Square", {}, torch.square),
        ("Log1p", {}, torch.log1p),
    ],
)
def test_operators_of_graphcore(name, attributes, expected):
    (found,) = library.run(name, X, attributes=attributes, domain="ai.graphcore")
    torch.testing.assert_close(found, expected(X))


def test_a_built_in_operator_refuses_what_it_does_not_take():
    with pytest.raises(poptorch.Error, match=r"ai\.onnx::Relu version 10 does not take 1 inputs"):
        library.run("Relu", X, attributes={"alpha": 1.0}, domain="ai.onnx", version=10)


def test_a_built_in_operator_is_compared_with_the_examples():
    with pytest.raises(poptorch.Error, match=r"gives torch\.float32 \(2, 3, 4\).*\(2,\)"):
        library.run("Relu", X, examples=[torch.empty(2)], domain="ai.onnx", version=10)
