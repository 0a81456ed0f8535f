"""Weights and buffers between host and device."""

import copy
import gc
import io

import pytest
import torch
from torch import nn

from tests.unit.executor.nets import (
    LR,
    TOLERANCE,
    Net,
    assert_same_weights,
    batch,
    eager_step,
    infer,
    make_options,
    train,
)


def test_training_matches_eager_and_is_seen_on_the_host():
    net = Net()
    twin = copy.deepcopy(net)
    model = train(net)
    optimizer = torch.optim.SGD(twin.parameters(), lr=LR)
    for _ in range(3):
        x, y = batch()
        model(x, y)
        eager_step(twin, optimizer, x, y)
    assert_same_weights(net, twin)


def test_a_training_loop_copies_nothing(implicit_copies):
    net = Net()
    model = train(net)
    for _ in range(5):
        model(*batch())
    assert implicit_copies() == 0
    _ = net.fc1.weight.shape, net.fc1.weight.dtype
    assert implicit_copies() == 0


READS = {
    "attribute": lambda net: net.fc1.weight.sum(),
    "parameters": lambda net: list(net.parameters()),
    "state_dict": lambda net: net.state_dict(),
    "call": lambda net: net(batch()[0]),
    "print": lambda net: str(net.fc2.bias),
    "equal": lambda net: torch.equal(net.fc1.weight, net.fc1.weight),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_the_first_read_copies_and_the_next_do_not(implicit_copies, read):
    gc.collect()  # models of other tests would be read, too
    net = Net()
    model = train(net)
    model(*batch())
    read(net)
    assert implicit_copies() == 1
    for other in READS.values():
        other(net)
    assert implicit_copies() == 1
    model(*batch())
    assert implicit_copies() == 1
    read(net)
    assert implicit_copies() == 2


def test_copies_if_needed_tell_whether_they_copied():
    net = Net()
    model = train(net)
    assert model.copyWeightsToHostIfNeeded() is False
    model(*batch())
    assert model.copyWeightsToHostIfNeeded() is True
    assert model.copyWeightsToHostIfNeeded() is False
    assert net.copyWeightsToHostIfNeeded() is False


def test_copy_to_host_writes_into_the_same_tensors():
    net = Net()
    weight = net.fc1.weight
    pointer, before = weight.data_ptr(), weight.detach().clone()
    model = train(net)
    model(*batch())
    model.copyWeightsToHost()
    assert net.fc1.weight is weight
    assert weight.data_ptr() == pointer
    assert not torch.equal(weight, before)


def test_copy_to_device_discards_training_progress():
    net = Net()
    before = copy.deepcopy(net.state_dict())
    model = train(net)
    x, y = batch()
    first = model(x, y)[1]
    model(x, y)
    model.copyWeightsToDevice()
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    assert torch.equal(model(x, y)[1], first)


def test_copy_to_device_after_a_read_keeps_the_progress():
    net = Net()
    model = train(net)
    model(*batch())
    seen = net.fc1.weight.detach().clone()
    model.copyWeightsToDevice()
    model.copyWeightsToHost()
    assert torch.equal(net.fc1.weight, seen)


def test_a_change_on_the_host_needs_copy_to_device():
    net = Net()
    model = infer(net)
    x, _ = batch()
    before = model(x)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    assert torch.equal(model(x), before)
    model.copyWeightsToDevice()
    assert torch.equal(model(x), torch.zeros(6, 3))


def test_state_dict_of_a_wrapped_model_is_plain_and_current():
    net = Net()
    twin = copy.deepcopy(net)
    model = train(net)
    x, y = batch()
    model(x, y)
    eager_step(twin, torch.optim.SGD(twin.parameters(), lr=LR), x, y)
    for state in (net.state_dict(), model.state_dict()):
        assert all(type(value) is torch.Tensor for value in state.values())
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(state[name], value, **TOLERANCE)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    fresh = Net()
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert_same_weights(fresh, twin)


@pytest.mark.parametrize("wrap", [train, infer])
def test_load_state_dict_of_the_executor_uploads(wrap):
    net, other = Net(), Net()
    model = wrap(net)
    x, y = batch()
    model(x, y)
    result = model.load_state_dict(other.state_dict())
    assert result.missing_keys == []
    out, _ = model(x, y)
    torch.testing.assert_close(out, other(x).detach(), **TOLERANCE)


def test_load_state_dict_before_compilation():
    net, other = Net(), Net()
    model = infer(net)
    model.load_state_dict(other.state_dict())
    x, _ = batch()
    torch.testing.assert_close(model(x), other(x).detach(), **TOLERANCE)


def test_load_state_dict_tells_missing_and_unexpected_keys():
    model = infer(Net())
    model.compile(batch()[0])
    state = Net().state_dict()
    state["extra"] = state.pop("fc1.bias")
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["fc1.bias"]
    assert result.unexpected_keys == ["extra"]


def test_load_state_dict_of_the_raw_model_does_not_upload():
    net, other = Net(), Net()
    model = infer(net)
    x, _ = batch()
    before = model(x)
    net.load_state_dict(other.state_dict())
    assert torch.equal(model(x), before)
    model.copyWeightsToDevice()
    torch.testing.assert_close(model(x), other(x).detach(), **TOLERANCE)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.fc = nn.Linear(4, 3)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y=None):
        x = self.fc(self.norm(x))
        return x if y is None else (x, self.loss(x, y))


def test_running_statistics_advance_once_per_micro_batch():
    net = Normed()
    twin = copy.deepcopy(net)
    model = train(net, make_options(2, 3))
    x, y = batch(24)
    model(x, y)
    for part in x.split(4):
        twin.norm(part)
    torch.testing.assert_close(net.norm.running_mean, twin.norm.running_mean, **TOLERANCE)
    torch.testing.assert_close(net.norm.running_var, twin.norm.running_var, **TOLERANCE)
    assert net.norm.num_batches_tracked == 0


class Clamping(nn.Module):
    """A model that changes a parameter in forward."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y=None):
        with torch.no_grad():
            self.fc.weight.clamp_(-0.3, 0.3).add_(0.01)
        x = self.fc(x)
        return x if y is None else (x, self.loss(x, y))


def test_a_parameter_that_inference_changes_is_copied_to_the_host():
    net = Clamping()
    twin = copy.deepcopy(net)
    x, _ = batch(6)
    model = infer(net, make_options(3))
    for _ in range(2):
        model(x)
        for part in x.split(2):
            twin(part)
    model.copyWeightsToHost()
    torch.testing.assert_close(net.fc.weight, twin.fc.weight, **TOLERANCE)


def test_a_parameter_that_forward_changes_is_trained_from_there():
    net = Clamping()
    twin = copy.deepcopy(net)
    optimizer = torch.optim.SGD(twin.parameters(), lr=LR)
    model = train(net)
    for _ in range(3):
        x, y = batch(6)
        model(x, y)
        eager_step(twin, optimizer, x, y)
    assert_same_weights(net, twin)


def test_buffers_that_inference_changes_stay_on_the_device():
    net = Normed().train()
    model = infer(net)
    x, _ = batch()
    model(x)
    assert torch.equal(net.norm.running_mean, torch.zeros(4))
    model.copyWeightsToHost()
    torch.testing.assert_close(net.norm.running_mean, 0.1 * x.mean(0), **TOLERANCE)


def test_trained_statistics_reach_inference():
    net = Normed()
    training = train(net)
    training(*batch())
    net.eval()
    x, _ = batch()
    inference = infer(net)
    torch.testing.assert_close(inference(x), net(x).detach(), **TOLERANCE)
    training(*batch())
    torch.testing.assert_close(inference(x), net(x).detach(), **TOLERANCE)
