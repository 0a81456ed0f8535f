"""Models that call the host: values, gradients, names, schedules, against eager PyTorch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch
from popsim_torch import OutputMode
from tests.options import make_options as some_options
from tests.parity.compare import assert_close
from tests.parity.tolerances import ONE_PASS, TRAINED

DTYPES = (torch.float32, torch.float16)
BATCH = 4


def make_options(d=1, ga=1):
    return some_options(d, ga, seed=3).outputMode(OutputMode.All)


class Wave:
    """What is called on the host; keeps what it was given, and has results of several types."""

    def __init__(self):
        self.given = []

    def __call__(self, x, y, *, scale):
        self.given.append(x)
        x = x.clone().mul_(scale)
        return torch.sin(x) * y, (x > 0).sum(0), y.detach() + 1


class Net(nn.Module):
    """Two layers, the host between them, and a loss."""

    def __init__(self, stages=(0, 0)):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)
        self.wave = Wave()
        self.cpu = poptorch.CPU(self.wave, "wave")
        self._stages = stages

    def forward(self, x, target=None):
        with poptorch.Block("a", ipu_id=self._stages[0]):
            h = torch.tanh(self.first(x))
        with poptorch.Block("b", ipu_id=self._stages[1]):
            y, count, shifted = self.cpu(h, h[:, :1], scale=3.0)
            out = self.second(y + 0.1 * count.to(y.dtype) * shifted)
            if target is None:
                return out, count
            return out, count, F.mse_loss(out, target)


def batches(num, dtype):
    return torch.randn(num * BATCH, 3).to(dtype), torch.randn(num * BATCH, 2).to(dtype)


def eager_training(net, optimizer, x, target, d, ga):
    """Train as the device does; return the results of all micro-batches."""
    results = []
    parts = zip(x.split(BATCH), target.split(BATCH), strict=True)
    for _ in range(d):
        optimizer.zero_grad()
        for _ in range(ga):
            out, count, loss = net(*next(parts))
            (loss / ga).backward()
            results.append((out.detach(), count.int(), loss.detach()[None]))
        optimizer.step()
    return [torch.cat(values) for values in zip(*results, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d, ga, stages", [(1, 1, (0, 0)), (2, 3, (0, 0)), (2, 4, (0, 1))])
def test_training(dtype, d, ga, stages):
    net = Net(stages).to(dtype)
    twin = copy.deepcopy(net)
    settings = {"lr": 0.02, "momentum": 0.5}
    optimizer = poptorch.optim.SGD(net.parameters(), use_combined_accum=False, **settings)
    model = poptorch.trainingModel(net, make_options(d, ga), optimizer)
    other = torch.optim.SGD(twin.parameters(), **settings)
    num_calls = 0
    for _ in range(3):
        x, target = batches(d * ga, dtype)
        results = model(x, target)
        # The call with zeros; then one in the forward pass and one in the backward pass.
        num_calls += 2 * d * ga
        assert len(net.wave.given) == num_calls + 1
        expected = eager_training(twin, other, x, target, d, ga)
        for ours, eager in zip(results, expected, strict=True):
            assert_close(ours.reshape(eager.shape), eager, ONE_PASS[dtype])
    for name, weight in twin.state_dict().items():
        assert_close(net.state_dict()[name], weight, TRAINED[dtype], name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stages", [(0, 0), (0, 1)])
def test_inference(dtype, stages):
    net = Net(stages).to(dtype)
    model = poptorch.inferenceModel(net, make_options(4))
    for _ in range(2):
        x, _ = batches(4, dtype)
        before = len(net.wave.given)
        out, count = model(x)
        device = net.wave.given[before:]
        assert all(tensor.dtype == dtype and tensor.device.type == "cpu" for tensor in device)
        expected = [net(part) for part in x.split(BATCH)]
        eager = net.wave.given[-4:]
        assert len(device) == 4 + (before == 0)
        for ours, theirs in zip(device[-4:], eager, strict=True):
            assert_close(ours, theirs, ONE_PASS[dtype])
        assert_close(out, torch.cat([o for o, _ in expected]), ONE_PASS[dtype])
        assert torch.equal(count.view(4, -1), torch.stack([c for _, c in expected]).int())


@pytest.mark.parametrize("mode", [1, 2, 3, 4])
def test_recomputation_repeats_no_call(mode):
    results = []
    for recomputation in (0, mode):
        options = make_options(1, 4)
        options._Popart.set("autoRecomputation", recomputation)
        net = Net((0, 1))
        optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
        model = poptorch.trainingModel(net, options, optimizer)
        torch.manual_seed(4)
        results.append(model(*batches(4, torch.float32)))
        assert len(net.wave.given) == 1 + 2 * 4
    for plain, rebuilt in zip(*results, strict=True):
        assert torch.equal(plain, rebuilt)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_number_of_threads_changes_no_bit(threads):
    def results():
        net = Net()
        optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
        model = poptorch.trainingModel(net, make_options(2, 2), optimizer)
        torch.manual_seed(4)
        return [*model(*batches(4, torch.float32)), net.first.weight.detach().clone()]

    before = torch.get_num_threads()
    expected = results()
    torch.set_num_threads(threads)
    try:
        actual = results()
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, expected, actual))


def test_names_and_anchors():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Net()

        def forward(self, x, target):
            with poptorch.NameScope("all"):
                return self.body(x, target)[2]

    options = make_options(1, 2)
    options.anchorTensor("wave", "all/body/CPU:0", OutputMode.All)
    options.anchorTensor("count", "all/body/CPU:1", OutputMode.Sum)
    options.anchorTensor("gradient", "Gradient___all/body/CPU:0", OutputMode.All)
    net = Model()
    twin = copy.deepcopy(net.body)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.0)
    model = poptorch.trainingModel(net, options, optimizer)
    x, target = batches(2, torch.float32)
    model(x, target)
    assert {"all/body/CPU:0", "all/body/CPU:1", "all/body/CPU:2"} <= set(model.getTensorNames())
    waves, counts, gradients = [], [], []
    for part, wanted in zip(x.split(BATCH), target.split(BATCH), strict=True):
        h = torch.tanh(twin.first(part))
        y, count, shifted = twin.wave(h, h[:, :1], scale=3.0)
        out = twin.second(y + 0.1 * count.float() * shifted)
        gradients += torch.autograd.grad(F.mse_loss(out, wanted), y)
        waves.append(y)
        counts.append(count)
    tolerance = ONE_PASS[torch.float32]
    assert_close(model.getAnchoredTensor("wave"), torch.cat(waves), tolerance)
    assert_close(model.getAnchoredTensor("gradient"), torch.cat(gradients), tolerance)
    assert torch.equal(model.getAnchoredTensor("count"), sum(counts).int())


TYPES = {
    torch.bool: torch.bool,
    torch.uint8: torch.uint8,
    torch.int8: torch.int8,
    torch.int16: torch.int16,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
    torch.float16: torch.float16,
    torch.float32: torch.float32,
    torch.float64: torch.float32,
    torch.bfloat16: torch.float32,
}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_element_types(dtype):
    given = []

    def twice(x):
        given.append(x)
        return torch.stack([x, x]), x.to(dtype)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cpu = poptorch.CPU(twice, "twice")

        def forward(self, x):
            both, same = self.cpu(x)
            return both.sum(0) if dtype != torch.bool else both[0], same

    x = torch.tensor([[0, 1, 3], [2, 0, 1]]).to(dtype)
    both, same = poptorch.inferenceModel(Model(), make_options())(x)
    assert {tensor.dtype for tensor in given} == {TYPES[dtype]}
    assert torch.equal(given[-1], x.to(TYPES[dtype]))
    assert not given[0].any()
    assert torch.equal(same.to(dtype), x)
    assert same.dtype == {torch.int64: torch.int32}.get(dtype, TYPES[dtype])
    assert torch.equal(both.to(dtype), x if dtype == torch.bool else (x + x))


def test_operands_and_results_in_any_layout():
    def transposed(x):
        assert x.is_contiguous()
        return x.view(-1).view(x.shape).transpose(0, 1), x[:, :1].expand(-1, 3)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cpu = poptorch.CPU(transposed, "transposed")

        def forward(self, x):
            return self.cpu(x.t())

    x = torch.randn(3, 4)
    turned, columns = poptorch.inferenceModel(Model(), make_options())(x)
    assert torch.equal(turned, x)
    assert torch.equal(columns, x[:1].t().expand(-1, 3))


def test_gradient_of_results_that_the_loss_does_not_use():
    def both(x, y, z):
        return x * y, y.exp()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.x, self.y, self.z = (nn.Parameter(torch.randn(3)) for _ in range(3))
            self.cpu = poptorch.CPU(both, "both")

        def forward(self):
            product, _ = self.cpu(self.x, self.y, self.z)
            return poptorch.identity_loss(product + 0 * self.z, "sum")

    model = Model()
    start = copy.deepcopy(model.state_dict())
    training = poptorch.trainingModel(
        model, make_options(), poptorch.optim.SGD(model.parameters(), lr=1.0)
    )
    training()
    assert_close(model.x, start["x"] - start["y"], TRAINED[torch.float32])
    assert_close(model.y, start["y"] - start["x"], TRAINED[torch.float32])
    assert torch.equal(model.z, start["z"])


def test_in_place_changes_around_a_call():
    """The backward pass gives the callable what the forward pass gave it."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.tensor([0.5, 1.5]))
            self.cpu = poptorch.CPU(self.exp, "exp")

        @staticmethod
        def exp(x):
            return x.mul_(2).exp()

        def forward(self):
            x = self.x * 1.0
            y = self.cpu(x)
            before = x.clone()
            x.add_(1.0)
            y.add_(x)
            return before, poptorch.identity_loss(y, "sum")

    model = Model()
    start = model.x.detach().clone()
    training = poptorch.trainingModel(
        model, make_options(), poptorch.optim.SGD(model.parameters(), lr=1.0)
    )
    before, loss = training()
    assert torch.equal(before, start)
    assert_close(loss, (start * 2).exp().sum() + (start + 1).sum(), ONE_PASS[torch.float32])
    assert_close(model.x, start - (2 * (2 * start).exp() + 1), TRAINED[torch.float32])


def test_what_autograd_cannot_follow_gets_no_gradient():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.randn(3))
            self.calls = []
            self.cpu = poptorch.CPU(self.through_numpy, "numpy")

        def through_numpy(self, x):
            self.calls.append(x)
            return torch.from_numpy(x.detach().numpy() * 2.0)

        def forward(self):
            return poptorch.identity_loss(self.cpu(self.x) + self.x, "sum")

    model = Model()
    start = model.x.detach().clone()
    training = poptorch.trainingModel(
        model, make_options(), poptorch.optim.SGD(model.parameters(), lr=1.0)
    )
    loss = training()
    assert len(model.calls) == 2  # none in the backward pass
    assert_close(loss, 3 * start.sum(), ONE_PASS[torch.float32])
    assert_close(model.x, start - 1, TRAINED[torch.float32])


def test_stochastic_rounding_leaves_results_of_the_host_alone():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cpu = poptorch.CPU(self.add, "add")
            self.given = []

        def add(self, x):
            self.given.append(x)
            return x + 1

        def forward(self, x):
            return self.cpu(x * 0.3)

    options = make_options()
    options.Precision.enableStochasticRounding(True)
    model = Model()
    x = torch.rand(1000).half()
    result = poptorch.inferenceModel(model, options)(x)
    assert model.given[-1].dtype == torch.float16
    assert torch.equal(result, model.given[-1] + 1)


def test_floating_point_exceptions_are_not_the_hosts():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cpu = poptorch.CPU(torch.log, "log")

        def forward(self, x, divide):
            y = self.cpu(x)
            return 1 / x if divide else y

    x = torch.tensor([0.0, 1.0])
    for divide in (False, True):
        options = make_options()
        options.Precision.enableFloatingPointExceptions(True)
        model = poptorch.inferenceModel(Model(), options)
        if divide:
            with pytest.raises(poptorch.Error, match="division by zero"):
                model(x, divide)
        else:
            assert torch.equal(model(x, divide), torch.log(x))


def test_gradients_that_forward_computes():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cpu = poptorch.CPU(torch.sin, "sin")

        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(self.cpu(2 * x).sum(), x)
            return gradient

    x = torch.randn(5)
    result = poptorch.inferenceModel(Model(), make_options())(x)
    assert_close(result, 2 * torch.cos(2 * x), ONE_PASS[torch.float32])


@pytest.mark.parametrize("stages", [(0, 0), (0, 1)])
def test_random_numbers_of_the_host_are_those_of_the_forward_pass(stages):
    """Several micro-batches are in flight in a pipeline, each with a mask of its own."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.randn(50))
            self.masks = []
            self.cpu = poptorch.CPU(self.drop, "drop")

        def drop(self, x):
            mask = torch.rand(50) < 0.5
            self.masks.append(mask)
            return x * mask

        def forward(self, factor):
            with poptorch.Block("a", ipu_id=stages[0]):
                x = self.x * factor
            with poptorch.Block("b", ipu_id=stages[1]):
                y = self.cpu(x)
                return y, poptorch.identity_loss(y, "sum")

    options = make_options(1, 4)
    options.anchorTensor("gradient", "Gradient___x", OutputMode.All)
    model = Model()
    training = poptorch.trainingModel(
        model, options, poptorch.optim.SGD(model.parameters(), lr=0.0)
    )
    training.compile(torch.ones(4))
    model.masks.clear()
    torch.manual_seed(9)
    y, _ = training(torch.ones(4))
    state = torch.get_rng_state()
    torch.manual_seed(9)
    forward = [torch.rand(50) < 0.5 for _ in range(4)]
    assert torch.equal(torch.get_rng_state(), state)  # the backward pass draws none
    assert torch.equal(y.view(4, 50) != 0, torch.stack(forward))
    gradients = training.getAnchoredTensor("gradient").view(4, 50)
    assert torch.equal(gradients != 0, torch.stack(forward))
    assert len(model.masks) == 8
