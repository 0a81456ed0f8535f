"""Buffers changed on one pipeline stage and read on another, against eager PyTorch."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch

NUM_MICRO_BATCHES = 4


class Net(nn.Module):
    """Two layers on two stages; ``first`` and ``second`` say what each does to the buffers."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 4)
        self.fc2 = nn.Linear(4, 4)
        self.register_buffer("memory", torch.arange(4.0))
        self.register_buffer("other", torch.arange(4.0) * 3)

    def forward(self, x):
        poptorch.Block.start(ipu_id=0)
        hidden = torch.tanh(self.fc1(x))
        old = self.first(hidden.detach())
        poptorch.Block.start(ipu_id=1)
        out = self.second(self.fc2(hidden), old)
        return out, poptorch.identity_loss(out, "mean")


class ReadLater(Net):
    def first(self, hidden):
        old = self.memory.clone()
        self.memory.add_(1)
        return old

    def second(self, out, old):
        return out * old + self.memory


class ReadLaterByViews(Net):
    def first(self, hidden):
        old = self.memory.clone()
        self.memory.add_(hidden.mean(0))
        return old.view(2, 2).t()

    def second(self, out, old):
        return out + old.reshape(4) + self.memory


class ReadLaterInParts(Net):
    """The change goes by a view, and nobody reads the new value."""

    def first(self, hidden):
        parts = self.memory.clone().chunk(2)
        self.memory.view(2, 2).add_(hidden.mean())
        return parts

    def second(self, out, old):
        return out + old[0][1] * old[1][0]


class Reversed(Net):
    """The new value is the old one in another order."""

    def first(self, hidden):
        old = self.memory.clone()
        self.memory.copy_(old.flip(0))
        return old

    def second(self, out, old):
        return out + old + 3 * self.memory


class Exchanged(Net):
    def first(self, hidden):
        old = self.memory.clone()
        self.memory.copy_(self.other)
        self.other.copy_(old)
        return old

    def second(self, out, old):
        return out + old + 2 * self.memory + 4 * self.other


class KeptLater(Net):
    """Stage 1 keeps a value of stage 0."""

    def first(self, hidden):
        return hidden[0]

    def second(self, out, old):
        before = self.memory.clone()
        self.memory.copy_(old)
        return out + before + self.memory


class ChangedLaterByAView(Net):
    def first(self, hidden):
        return hidden.mean()

    def second(self, out, old):
        before = self.memory * 2
        self.memory.view(2, 2).add_(old)
        return out + before


NETS = [
    *(ReadLater, ReadLaterByViews, ReadLaterInParts, Reversed),
    *(Exchanged, KeptLater, ChangedLaterByAView),
]


def make_options(strategy):
    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    options.outputMode(poptorch.OutputMode.All)
    if strategy is not None:
        options.setExecutionStrategy(strategy())
    return options


def device_and_eager(kind):
    torch.manual_seed(1)
    net, eager = kind(), kind()
    eager.load_state_dict(net.state_dict())
    x = torch.randn(NUM_MICRO_BATCHES, 3, 4)
    with torch.no_grad():
        expected = torch.cat([eager(micro_batch)[0] for micro_batch in x])
    return net, eager, x.flatten(0, 1), expected


@pytest.mark.parametrize("strategy", [None, poptorch.ShardedExecution], ids=["pipe", "shard"])
@pytest.mark.parametrize("kind", NETS)
def test_training(kind, strategy):
    net, eager, x, expected = device_and_eager(kind)
    options = make_options(strategy)
    options.Training.gradientAccumulation(NUM_MICRO_BATCHES)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.0)
    model = poptorch.trainingModel(net, options, optimizer)
    torch.testing.assert_close(model(x)[0], expected)
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(net.get_buffer(name), buffer)


@pytest.mark.parametrize("strategy", [None, poptorch.ShardedExecution], ids=["pipe", "shard"])
@pytest.mark.parametrize("kind", NETS)
def test_inference(kind, strategy):
    net, _, x, expected = device_and_eager(kind)
    options = make_options(strategy)
    options.deviceIterations(NUM_MICRO_BATCHES)
    torch.testing.assert_close(poptorch.inferenceModel(net, options)(x)[0], expected)


class ReadTooEarly(Net):
    """Stage 0 reads it, by a part, when stage 1 is a micro-batch after."""

    def first(self, hidden):
        return self.memory.clone().chunk(2)[0]

    def second(self, out, old):
        self.memory.add_(1)
        return out + old[0]


def test_a_buffer_read_on_an_earlier_stage_than_it_is_changed_on():
    net, _, x, _ = device_and_eager(ReadTooEarly)
    options = make_options(None)
    options.deviceIterations(NUM_MICRO_BATCHES)
    model = poptorch.inferenceModel(net, options)
    match = "'memory' is read on pipeline stage 0 and changed on stage 1. Read and change it on the"
    with pytest.raises(poptorch.Error, match=match):
        model.compile(x)
