"""Which weights a training step changes, and what happens when optimizers are exchanged."""

import logging

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.unit.executor.nets import LR, Net, batch, infer, make_options, train

STEP = "Step___fc1.weight"


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.unused = nn.Parameter(torch.ones(2))
        self.aside = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x):
        out = self.fc(x) * self.frozen
        return self.aside * 2, poptorch.identity_loss((out * out).sum(), "none")


@pytest.mark.parametrize("name", ["unused", "aside", "frozen"])
def test_parameters_without_a_gradient_stay_as_they_are(name):
    net = Mixed()
    optimizer = poptorch.optim.SGD(net.parameters(), lr=LR, weight_decay=0.5)
    model = train(net, None, optimizer)
    before = net.fc.weight.detach().clone()
    aside, _ = model(torch.randn(4, 2))
    assert torch.equal(getattr(net, name), torch.ones(2))
    assert torch.equal(aside, torch.full((2,), 2.0))
    assert not torch.equal(net.fc.weight, before)


def test_a_parameter_in_no_group_is_trained_with_the_defaults():
    net = Mixed()
    optimizer = poptorch.optim.SGD([{"params": [net.fc.weight], "lr": 0.0}], lr=LR)
    model = train(net, None, optimizer)
    weight, bias = net.fc.weight.detach().clone(), net.fc.bias.detach().clone()
    model(torch.randn(4, 2))
    assert torch.equal(net.fc.weight, weight)
    assert not torch.equal(net.fc.bias, bias)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor([1]))
        self.register_buffer("ready", torch.tensor([True]))
        self.register_buffer("silent", torch.tensor([1]))
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        self.count.add_(1)
        return self.norm(x) * self.count * self.ready


def test_buffers_of_integer_types_are_constants(caplog):
    net = Counting().eval()
    model = infer(net)
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        first = model(torch.ones(4, 2))
    (record,) = (r for r in caplog.records if "Buffers of integer types" in r.getMessage())
    assert record.getMessage().endswith(": count, ready")
    (changed,) = (r for r in caplog.records if "forward changes" in r.getMessage())
    assert "forward changes count, which is a constant" in changed.getMessage()
    assert "a buffer of floating-point numbers" in changed.getMessage()
    net.count.fill_(5)
    model.copyWeightsToDevice()
    assert torch.equal(model(torch.ones(4, 2)), first)
    model.copyWeightsToHost()
    assert net.count.item() == 5


class Queue(nn.Module):
    """A ring buffer: the place of the next element is a buffer."""

    def __init__(self, dtype):
        super().__init__()
        self.register_buffer("queue", torch.zeros(6, 2))
        self.register_buffer("place", torch.zeros(1, dtype=dtype))

    def forward(self, x):
        self.queue[((self.place + torch.arange(2, device=x.device)) % 6).long()] = x
        self.place.copy_((self.place + 2) % 6)
        return x + 1


@pytest.mark.parametrize("dtype", [torch.long, torch.float32], ids=str)
def test_an_index_into_a_buffer_that_changes(dtype, caplog):
    net, eager = Queue(dtype), Queue(dtype)
    model = infer(net)
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        for step in range(2):
            model(torch.full((2, 2), step + 1.0))
            eager(torch.full((2, 2), step + 1.0))
    found = [r.getMessage() for r in caplog.records if "forward changes" in r.getMessage()]
    assert ["place" in text and ".long() can be an index" in text for text in found] == (
        [True] if dtype == torch.long else []
    )
    model.copyWeightsToHost()
    assert torch.equal(net.queue, eager.queue) is (dtype == torch.float32)


def test_the_counter_of_batch_norm_stands_still():
    net = Counting()
    model = infer(net)
    model(torch.randn(4, 2))
    model.copyWeightsToHost()
    assert net.norm.num_batches_tracked == 0
    assert net.norm.running_mean.any()


# --- Optimizers -----------------------------------------------------------------------------


def adam(net):
    return poptorch.optim.Adam(net.parameters(), lr=LR)


def test_an_optimizer_without_state_goes_on_with_that_of_the_device():
    net = Net()
    first, second = adam(net), adam(net)
    model = train(net, None, first)
    model(*batch())
    model.setOptimizer(second)
    assert first.state_dict()["ipu_state"][STEP].item() == 1
    model(*batch())
    assert first.state_dict()["ipu_state"][STEP].item() == 1
    assert second.state_dict()["ipu_state"][STEP].item() == 2


@pytest.mark.parametrize("detached", [False, True])
def test_an_optimizer_with_state_brings_it_along(detached):
    net, other = Net(), Net()
    saved = adam(other)
    trainer = train(other, None, saved)
    for _ in range(3):
        trainer(*batch())
    second = adam(net)
    second.load_state_dict(saved.state_dict())
    model = train(net, None, adam(net))
    model(*batch())
    if detached:
        model.detachFromDevice()
    model.setOptimizer(second)
    assert model.isAttachedToDevice() != detached
    model(*batch())
    assert second.state_dict()["ipu_state"][STEP].item() == 4


def test_the_same_optimizer_keeps_its_state():
    net = Net()
    optimizer = adam(net)
    model = train(net, None, optimizer)
    model(*batch())
    optimizer.param_groups[0]["lr"] = 0.5
    model.setOptimizer(optimizer)
    model(*batch())
    assert optimizer.state_dict()["ipu_state"][STEP].item() == 2


def test_state_is_none_before_compilation():
    net = Net()
    optimizer = adam(net)
    model = train(net, None, optimizer)
    state = optimizer.state_dict()
    assert state["ipu_state"] is None
    assert state["ipu_param"] is None
    model.compile(*batch())
    state = optimizer.state_dict()
    assert state["ipu_state"][STEP].item() == 0
    assert state["ipu_param"]


def test_loaded_state_is_read_back_before_and_after_a_run():
    net = Net()
    optimizer = adam(net)
    model = train(net, None, optimizer)
    model(*batch())
    saved = optimizer.state_dict()
    model(*batch())
    assert optimizer.state_dict()["ipu_state"][STEP].item() == 2
    optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["ipu_state"][STEP].item() == 1
    model(*batch())
    assert optimizer.state_dict()["ipu_state"][STEP].item() == 2


@pytest.mark.parametrize("keys", [(), ("state", "param_groups")])
def test_state_that_is_not_a_devices_is_refused(keys):
    optimizer = adam(Net())
    whole = optimizer.state_dict()
    with pytest.raises(RuntimeError):
        optimizer.load_state_dict({key: whole[key] for key in keys})


def test_copying_weights_to_the_device_keeps_the_optimizers_state():
    net = Net()
    optimizer = adam(net)
    model = train(net, make_options(), optimizer)
    model(*batch())
    model.copyWeightsToDevice()
    assert optimizer.state_dict()["ipu_state"][STEP].item() == 1
