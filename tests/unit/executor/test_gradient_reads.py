"""Host code that looks for gradients of weights that the device trains is told of it."""

import contextlib
import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch

X, Y = torch.ones(6, 4), torch.zeros(6, 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.loss = nn.MSELoss()

    def forward(self, x, y):
        return self.loss(self.fc(x), y)


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=0.1)


@pytest.fixture
def model(net, optimizer):
    return poptorch.trainingModel(net, optimizer=optimizer)


def warnings(caplog):
    return [one.getMessage() for one in caplog.records if "has no effect on" in one.getMessage()]


CALLS = {
    "clip_grad_norm_": (
        lambda net, optimizer: nn.utils.clip_grad_norm_(net.parameters(), 1.0),
        "max_grad_norm",
    ),
    "step": (lambda net, optimizer: optimizer.step(), "Remove the call"),
    "zero_grad": (lambda net, optimizer: optimizer.zero_grad(), "Remove the call"),
    "zero_grad of the model": (lambda net, optimizer: net.zero_grad(), "Remove the call"),
    "read": (lambda net, optimizer: net.fc.weight.grad, "anchor 'Gradient___'"),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_told_once(name, net, optimizer, model, caplog):
    call, advice = CALLS[name]
    model(X, Y)
    assert not warnings(caplog)
    call(net, optimizer)
    call(net, optimizer)
    (message,) = warnings(caplog)
    words = "A read of parameter.grad" if name == "read" else f"{name.split()[0]}()"
    assert message.startswith(f"{words} at {__file__}:")
    assert advice in message
    before = net.fc.weight.detach().clone()
    model(X, Y)
    assert not torch.equal(net.fc.weight, before)


def test_clipping_by_value_is_told(net, model, caplog):
    model(X, Y)
    with contextlib.suppress(RuntimeError):  # some versions of PyTorch refuse an empty list
        nn.utils.clip_grad_value_(net.parameters(), 1.0)
    (message,) = warnings(caplog)
    assert message.startswith("clip_grad_value_() at")


def test_backward_of_the_result_raises(model):
    with pytest.raises(poptorch.Error, match="cannot be called explicitly"):
        model(X, Y).backward()


@pytest.mark.parametrize("name", CALLS)
def test_before_the_first_call_the_host_may_train(name, net, optimizer, model, caplog):
    call, _ = CALLS[name]
    call(net, optimizer)
    net(X, Y).backward()
    call(net, optimizer)
    assert not warnings(caplog)


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_the_host_are_there(name, net, optimizer, model, caplog):
    model(X, Y)
    net(X, Y).backward()
    assert net.fc.weight.grad.abs().sum() > 0
    CALLS[name][0](net, optimizer)
    assert not warnings(caplog)


def test_copies_and_states_read_no_gradients(net, optimizer, model, caplog):
    model(X, Y)
    copy.deepcopy(net)
    net.state_dict()
    optimizer.state_dict()
    net.float()
    assert not warnings(caplog)


@pytest.mark.parametrize(
    "clip, limit", [(nn.utils.clip_grad_norm_, 0.1), (nn.utils.clip_grad_value_, 0.01)]
)
def test_a_hook_of_the_optimizer_clips_in_the_program(clip, limit, net, optimizer):
    twin = Net()
    twin.load_state_dict(net.state_dict())
    twin(X, Y).backward()
    clip(twin.parameters(), limit)
    torch.optim.SGD(twin.parameters(), lr=0.1).step()

    def hook(step, args, kwargs):
        clip([one for group in step.param_groups for one in group["params"]], limit)

    optimizer.register_step_pre_hook(hook)
    poptorch.trainingModel(net, optimizer=optimizer)(X, Y)
    torch.testing.assert_close(net.fc.weight, twin.fc.weight)
