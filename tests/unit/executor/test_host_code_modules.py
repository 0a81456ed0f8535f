"""Modules that a program calls on the host: which module is called, and with which weights."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import OutputMode
from tests.options import make_options
from tests.unit.executor.host_calls import X, infer

pytestmark = pytest.mark.timeout(120)


class WithPart(nn.Module):
    """A model with a submodule that runs on the host and has its own state."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3)
        self.part = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.cpu = poptorch.CPU(self.part, "part")

    def forward(self, x):
        x = self.cpu(self.first(x))
        return x, poptorch.identity_loss(x.square(), "mean")


@pytest.mark.parametrize("training", [False, True])
def test_a_part_of_the_model(training):
    net = WithPart()
    twin = copy.deepcopy(net)
    assert not any(parameter.requires_grad for parameter in net.part.parameters())
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    if training:
        optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
        model = poptorch.trainingModel(net, make_options(), optimizer)
    else:
        model = poptorch.inferenceModel(net, make_options())
    twin.part(torch.zeros(4, 3))  # as the compilation does
    other = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        x = torch.randn(4, 3)
        out, loss = model(x)
        expected, expected_loss = twin(x)
        torch.testing.assert_close(out, expected.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-4, atol=1e-5)
        if training:
            other.zero_grad()
            # The device calls the part once more, to differentiate it.
            copy_of_part = copy.deepcopy(twin.part)
            expected_loss.backward()
            other.step()
            copy_of_part(twin.first(x))
            twin.part[1].running_mean = net.part[1].running_mean.detach().clone()
            twin.part[1].running_var = net.part[1].running_var.detach().clone()
    for name, value in net.state_dict().items():
        if name.startswith("part.0"):
            assert torch.equal(value, weights[name])
    assert "part.0.weight" not in model.getTensorNames()
    assert net.part[1].num_batches_tracked == (7 if training else 4)
    torch.testing.assert_close(net.first.weight, twin.first.weight, rtol=1e-4, atol=1e-5)
    assert type(net.part[0].weight.detach()) is torch.Tensor


def test_modules_that_share_their_places():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(2, 2)
            self.other = copy.copy(self.one)
            self.cpu = poptorch.CPU(self.other, "other")

        def forward(self, x):
            return self.cpu(self.one(x))

    net = Model()
    assert net.one._parameters is net.other._parameters
    model = poptorch.inferenceModel(net, make_options())
    for _ in range(2):
        torch.testing.assert_close(model(X), net.one(net.one(X)).detach())
    assert type(net.one.weight) is nn.Parameter


def test_changed_weights_of_a_module_count_at_the_next_call():
    part = nn.Linear(2, 2, bias=False)
    model = infer(part)
    nn.init.eye_(part.weight)
    assert torch.equal(model(X), 2 * X + 1)
    with torch.no_grad():
        part.weight *= 3
    assert torch.equal(model(X), 6 * X + 1)


def test_a_module_may_replace_its_buffers_on_the_host():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            self.count = self.count + 1
            return x + self.count

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.counter = Counter()
            self.cpu = poptorch.CPU(self.counter, "counter")

        def forward(self, x):
            return self.cpu(x)

    net = Model()
    model = poptorch.inferenceModel(net, make_options())
    assert torch.equal(model(X), X + 2)
    assert torch.equal(model(X), X + 3)
    assert net.counter.count == 3


def test_weights_that_the_device_trains_are_those_copied_last():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.cpu = poptorch.CPU(lambda x: x * self.weight, "tied")

        def forward(self, x):
            return self.cpu(x), poptorch.identity_loss(x * self.weight, "sum")

    net = Tied()
    model = poptorch.trainingModel(net, make_options(), poptorch.optim.SGD(net.parameters(), 1.0))
    ones = torch.ones(2)
    assert torch.equal(model(ones)[0], torch.ones(2))
    assert torch.equal(model(ones)[0], torch.ones(2))
    assert torch.equal(net.weight, torch.full((2,), -1.0))  # copies them
    assert torch.equal(model(ones)[0], torch.full((2,), -1.0))


def test_made_in_forward():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Linear(2, 2)

        def forward(self, x):
            return poptorch.CPU(self.part, "made in forward")(x)

    net = Model()
    model = poptorch.inferenceModel(net, make_options())
    torch.testing.assert_close(model(X), net.part(X))
    assert not net.part.weight.requires_grad
    assert type(net.part.weight) is nn.Parameter


def test_marked_as_the_begin_of_a_block():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.negate = poptorch.BeginBlock(poptorch.CPU(torch.neg, "neg"), ipu_id=1)

        def forward(self, x):
            return self.negate(2 * x)

    model = poptorch.inferenceModel(Model(), make_options(2).outputMode(OutputMode.All))
    assert torch.equal(model(torch.ones(4)), torch.full((4,), -2.0))
    (op,) = [op for op in model.compiled.program.graph.ops if op.kind == "host_call"]
    assert op.stage == 1
