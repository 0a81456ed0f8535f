"""The interpreter beside an executor: from where that is, in float64, and its messages."""

import pytest
import torch
from hypothesis import given, settings
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import OutputMode
from popsim_torch.errors import Error
from popsim_torch.ir import LoopCounts
from popsim_torch.reference import Interpreter
from tests.options import make_options
from tests.parity.test_random_graphs import COMMON, LEARNING_RATE, TOLERANCE, Graph, recipes
from tests.parity.test_random_graphs import _eager_and_exact as eager_and_exact
from tests.reference.agree import assert_agrees


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(5, 7)
        self.dropout = nn.Dropout(0.4)
        self.fc2 = nn.Linear(7, 3)

    def forward(self, x, y):
        out = self.fc2(self.dropout(torch.tanh(self.fc1(x))))
        return out, nn.functional.cross_entropy(out, y)


def trained(calls=2):
    """Return an executor that has trained, and data of its calls."""
    torch.manual_seed(0)
    net, options = Net(), make_options(2, 3)
    options.outputMode(OutputMode.All)
    options.randomSeed(5)
    options.anchorTensor("grad", "Gradient___fc1.weight", OutputMode.All)
    options.anchorTensor("term", "AdamUpdater___fc1.weight", OutputMode.All)
    model = poptorch.trainingModel(net, options, poptorch.optim.Adam(net.parameters(), lr=0.01))
    data = torch.randn(24, 5), torch.randint(3, (24,))
    model.compile(*data)
    for _ in range(calls):
        model(*data)
    return model, data


@pytest.mark.parametrize("host", [False, True], ids=["as it was lowered", "fitted to the host"])
def test_it_goes_on_from_where_the_executor_is(host):
    model, data = trained()
    interpreter = Interpreter.like(model, host=host)
    for _ in range(2):
        out, loss, grad, term = interpreter.run(data)
        ours = model(*data)
        assert_agrees(ours[0], out, close=1e-4)
        assert_agrees(ours[1], loss, close=1e-4)
        assert_agrees(model.getAnchoredTensor("grad"), grad, close=1e-4)
        assert_agrees(model.getAnchoredTensor("term"), term, close=1e-3)
    model.copyWeightsToHost()
    for name, weight in model.named_parameters():
        assert_agrees(weight.detach(), interpreter.read(name), close=1e-5, what=name)


def test_a_period_of_an_anchor_goes_on_from_run_to_run():
    """Runs without an iteration of the period bring back what the last one with one did."""
    torch.manual_seed(0)
    options = make_options(2)
    options.anchorTensor("every", "Gemm:0", OutputMode.EveryN, 5)
    model = poptorch.inferenceModel(nn.Linear(3, 2), options)
    data = torch.randn(7, 4, 3)
    model(data[0])
    interpreter = Interpreter.like(model)
    for number, x in enumerate(data[1:], 1):
        model(x)
        _, every = interpreter.run([x])
        if number >= 2:
            assert_agrees(model.getAnchoredTensor("every"), every, close=1e-6)
        else:
            assert not every.any()


def test_before_the_first_call():
    model, data = trained(calls=0)
    (out, _), expected = model(*data), Interpreter.like(trained(calls=0)[0]).run(data)
    assert_agrees(out, expected[0], close=1e-4)


def test_a_wide_run_tells_the_error_of_each_tensor():
    model, data = trained()
    plain, wide = Interpreter.like(model), Interpreter.like(model, wide=True)
    results = plain.run(data), wide.run(data)
    errors = [(a.double() - b).abs().max() / b.abs().max() for a, b in zip(*results, strict=True)]
    assert all(0 < error < 1e-4 for error in errors)
    name = "fc1/Gemm:0"
    a, b = plain.read(name), wide.read(name)
    assert (a.dtype, b.dtype) == (torch.float32, torch.float64)
    assert 0 < (a.double() - b).abs().max() < 1e-5
    # The same units are dropped.
    assert torch.equal(plain.read("fc2/Gemm:0") == 0, wide.read("fc2/Gemm:0") == 0)


def test_printed_and_enqueued_tensors_are_noted():
    class Shown(nn.Module):
        def forward(self, x):
            return poptorch.ipu_print_tensor(x + 1, "shown") * 2

    model = poptorch.inferenceModel(Shown(), make_options())
    x = torch.arange(3.0)
    model.compile(x)
    interpreter = Interpreter.like(model)
    (out,) = interpreter.run([x])
    ((title, value),) = interpreter.record.prints
    assert title == "shown" and torch.equal(value, x + 1) and torch.equal(out, 2 * x + 2)


MISTAKES = {
    "an input too few": (lambda i, x, y: i.run([x]), "1 inputs were given; the program has 2"),
    "one micro-batch's data of six": (
        lambda i, x, y: i.run([x[:5], y]),
        r"'input' has shape \[4, 5\] in each of 6 micro-batches, but the given tensor has \[5, 5\]",
    ),
    "a name that is not there": (
        lambda i, x, y: i.read("fc1.weigth"),
        "no tensor named 'fc1.weigth'; the closest names are 'fc1.weight'",
    ),
    "a weight of another shape": (
        lambda i, x, y: i.write("fc1.weight", torch.zeros(5, 7)),
        r"'fc1.weight' has shape \[7, 5\], the value has \[5, 7\]",
    ),
    "what is no variable": (
        lambda i, x, y: i.write("fc1/Gemm:0", torch.zeros(4, 7)),
        "'fc1/Gemm:0' is computed by the program",
    ),
}


@pytest.mark.parametrize(("mistake", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(mistake, message):
    model, data = trained(calls=0)
    with pytest.raises(Error, match=message):
        mistake(Interpreter.like(model), *data)


def rounds_to_half(graph):
    return any(op.kind == "map" and "half" in str(op.attributes["code"]) for op in graph.ops)


@settings(max_examples=10, derandomize=True, **COMMON)
@given(recipes)
def test_random_graphs(recipe):
    """In float64 the programs of random graphs give what eager PyTorch does in float64.

    But for those that round to float16 on the way, which a wide run does not.
    """
    model, inputs = Graph(recipe), recipe.make_inputs()
    _, exact = eager_and_exact(model, inputs, recipe.loop)
    options = recipe.loop.options()
    options.outputMode(OutputMode.All)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    device = poptorch.trainingModel(model, options, optimizer)
    device.compile(*inputs)
    plain, wide = (Interpreter.like(device, wide=wide) for wide in (False, True))
    loop = LoopCounts(recipe.loop.device_iterations, recipe.loop.accumulation)
    assert device.compiled.run.loop == loop
    ours = device(*inputs)
    for i, (actual, near, precise) in enumerate(
        zip(ours, plain.run(inputs), wide.run(inputs), strict=True)
    ):
        wanted = torch.cat([results[i].reshape(-1) for results in exact.results])
        close = TOLERANCE.of(wanted.float())
        rounds = rounds_to_half(device.compiled.program.graph)
        for value in (actual, near) if rounds else (actual, near, precise):
            torch.testing.assert_close(value.double().reshape(-1), wanted, **close)
