"""The helpers for tests of mistakes: a model that can make one, and the check after each.

After a mistake the process, the user's model and the executor must stay usable: every test ends
with a correct call, whose values are compared with eager PyTorch.
"""

import copy
import gc

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options


class Net(nn.Module):
    """A linear classifier that calls ``mistake(self, x)`` in forward while it is switched on.

    The switch is a dict because an executor traces a shallow copy of the model.
    """

    def __init__(self, mistake=None):
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.register_buffer("offset", torch.full((3,), 0.5))
        self.loss = nn.CrossEntropyLoss()
        self.mistake = mistake
        self.switch = {"on": mistake is not None}

    def forward(self, x, y=None):
        if self.switch["on"]:
            result = self.mistake(self, x)
            if result is not None:
                return result
        out = self.fc(x) + self.offset
        return out if y is None else (out, self.loss(out, y))


def train(net, options=None, lr=0.125):
    """Wrap a model for training."""
    optimizer = poptorch.optim.SGD(net.parameters(), lr=lr)
    return poptorch.trainingModel(net, options or make_options(), optimizer)


def good_batch(size=6):
    return torch.randn(size, 4), torch.randint(0, 3, (size,))


def check_inference(executor):
    """Run an inference executor of a ``Net`` and compare with eager PyTorch, twice."""
    net = executor.model
    for size in (6, 6):
        x, _ = good_batch(size)
        with torch.no_grad():
            torch.testing.assert_close(executor(x), net(x), rtol=1e-5, atol=1e-6)


def check_training(executor, lr=0.125):
    """Run two steps of a training executor of a ``Net`` and compare with eager PyTorch."""
    net = executor.model
    twin = Net()
    twin.load_state_dict({k: v.clone() for k, v in copy.deepcopy(net.state_dict()).items()})
    optimizer = torch.optim.SGD(twin.parameters(), lr=lr)
    for _ in range(2):
        x, y = good_batch()
        out, loss = executor(x, y)
        optimizer.zero_grad()
        eager_out, eager_loss = twin(x, y)
        eager_loss.backward()
        optimizer.step()
        torch.testing.assert_close(out, eager_out.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(loss, eager_loss.detach(), rtol=1e-5, atol=1e-6)
    for name, weight in twin.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], weight, rtol=1e-5, atol=1e-6)


def refuse_training(net, options, error, match):
    """Check that a training model cannot be compiled; return the error's message.

    The executor no longer exists afterwards, so the model can be wrapped again.
    """
    model = train(net, options)
    with pytest.raises(error, match=match) as caught:
        model(*good_batch(24))
    assert not model.isCompiled()
    text = str(caught.value)
    del model, caught
    gc.collect()  # the traceback refers to the executor
    return text


class Helpers:
    """The functions above; tests get them as the fixture ``h``."""

    Net = Net
    make_options = staticmethod(make_options)
    train = staticmethod(train)
    good_batch = staticmethod(good_batch)
    check_inference = staticmethod(check_inference)
    check_training = staticmethod(check_training)
    refuse_training = staticmethod(refuse_training)


@pytest.fixture
def h():
    """Return the helpers."""
    return Helpers


@pytest.fixture(params=["training", "inference"])
def refused(request):
    """Let a mistake happen in forward; check the error, and that everything still works."""

    def run(mistake, error, match):
        net = Net(mistake)
        before = copy.deepcopy(net.state_dict())
        x, y = good_batch()
        if request.param == "training":
            executor, inputs, check = train(net), (x, y), check_training
        else:
            executor = poptorch.inferenceModel(net, make_options())
            inputs, check = (x,), check_inference
        for _ in range(2):
            with pytest.raises(error, match=match or None) as caught:
                executor(*inputs)
            assert not executor.isCompiled()
        for name, value in net.state_dict().items():
            assert type(value) is torch.Tensor
            assert torch.equal(value, before[name])
        assert not poptorch.isRunningOnIpu()
        net.switch["on"] = False
        check(executor)
        # Another model is not affected.
        check_inference(poptorch.inferenceModel(Net(), make_options()))
        return caught.value

    return run
