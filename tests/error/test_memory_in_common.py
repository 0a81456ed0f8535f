"""Parameters, buffers and host tensors that share memory, where the device has a copy of each."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import popsim_torch as poptorch

X = torch.arange(6.0).reshape(2, 3) / 4


class Tied(nn.Module):
    """An autoencoder; the function ties the two weights."""

    def __init__(self, tie):
        super().__init__()
        self.enc, self.dec = nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)
        tie(self)

    def forward(self, x):
        result = self.dec(self.enc(x))
        return result, F.mse_loss(result, x)


def by_view(net):
    net.dec.weight = nn.Parameter(net.enc.weight.t())


def by_data(net):
    net.dec.weight.data = net.enc.weight.data.t()


def by_numpy(net):
    net.dec.weight = nn.Parameter(torch.from_numpy(net.enc.weight.detach().numpy().T))


def partly(net):
    table = torch.zeros(9)
    net.enc.weight = nn.Parameter(table[:6].view(2, 3))
    net.dec.weight = nn.Parameter(table[3:].view(3, 2))


def neighbours(net):
    table = torch.linspace(-1, 1, 12).reshape(3, 4)
    net.enc.weight = nn.Parameter(table.t()[:2])
    net.dec.weight = nn.Parameter(table[:, 2:])


def trained(net, kind=poptorch.trainingModel):
    return kind(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))


class Counts(nn.Module):
    """Changes a buffer."""

    def __init__(self, counts):
        super().__init__()
        self.register_buffer("counts", counts)

    def forward(self, x):
        self.counts[..., 0] += x
        return self.counts + 0


@pytest.mark.parametrize(
    "counts",
    [torch.zeros(1).expand(3), torch.arange(5.0).unfold(0, 3, 1), torch.zeros(3, 1).expand(3, 2)],
    ids=["expanded", "unfolded", "expanded rows"],
)
def test_elements_of_one_buffer(counts):
    with pytest.raises(poptorch.Error, match=r"forward changes 'counts', several.*contiguous\(\)"):
        poptorch.inferenceModel(Counts(counts))(torch.tensor(1.0))
    net = Counts(counts.contiguous())
    eager = copy.deepcopy(net)
    model = poptorch.inferenceModel(net)
    for _ in range(2):
        torch.testing.assert_close(model(torch.tensor(1.0)), eager(torch.tensor(1.0)))


def test_an_expanded_buffer_that_does_not_change():
    model = poptorch.inferenceModel(Weighted(torch.tensor([2.0]).expand(3)))
    torch.testing.assert_close(model(X), 2 * X)


def test_an_expanded_weight():
    net = nn.Linear(3, 2)
    net.weight = nn.Parameter(torch.ones(1).expand(2, 3))
    loss = poptorch.trainingModel(
        WithLoss(net), optimizer=torch.optim.SGD(net.parameters(), lr=0.1)
    )
    with pytest.raises(poptorch.Error, match=r"training changes .net\.weight., several elements"):
        loss(X)


class Weighted(nn.Module):
    def __init__(self, factors):
        super().__init__()
        self.register_buffer("factors", factors)

    def forward(self, x):
        return self.factors * x


class WithLoss(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return poptorch.identity_loss(self.net(x).sum(), "none")


@pytest.mark.parametrize("tie", [by_view, by_data, by_numpy, partly])
def test_weights_that_are_tied_by_their_memory(tie):
    net = Tied(tie)
    message = (
        "training changes 'enc.weight', which shares memory with 'dec.weight'.*copy of each.*"
        r"same nn.Parameter object.*F.linear\(x, self.enc.weight.t\(\)\)"
    )
    with pytest.raises(poptorch.Error, match=message):
        trained(net)(X)
    torch.testing.assert_close(poptorch.inferenceModel(net)(X), net(X))
    net.dec.weight.requires_grad_(False)
    with pytest.raises(poptorch.Error, match=r"shares memory with 'dec\.weight'"):
        trained(net)(X)
    net.enc.weight.requires_grad_(False)
    torch.testing.assert_close(trained(net)(X), net(X))


def compare(net, inputs, steps=3):
    """Train a model in eager PyTorch and on the device."""
    other = copy.deepcopy(net)
    model, optimizer = trained(net), torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        expected = other(*inputs)
        expected[-1].backward()
        optimizer.step()
        torch.testing.assert_close(model(*inputs), expected)
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)


class Same(Tied):
    def forward(self, x):
        result = F.linear(self.enc(x), self.enc.weight.t())
        return result, F.mse_loss(result, x)


def same_object(net):
    net.dec.weight = net.enc.weight


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 3)
        weights = list(self.lstm.parameters())
        flat = torch.cat([one.detach().flatten() for one in weights])
        parts = flat.split([one.numel() for one in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.data = part.view_as(weight)

    def forward(self, x):
        result = self.lstm(x)[0]
        return result, F.mse_loss(result, x)


@pytest.mark.parametrize("net", [Tied(neighbours), Same(same_object), Recurrent()])
def test_weights_in_one_memory_that_are_apart(net):
    compare(net, (X,))


class Statistics(nn.Module):
    def __init__(self, change, use):
        super().__init__()
        self.register_buffer("stats", torch.zeros(2, 2))
        self.register_buffer("mean", self.stats[0])
        self.register_buffer("other", self.stats[1])
        self.view = self.stats.view(4)
        self.weight = nn.Parameter(torch.ones(2))
        self.change, self.use = change, use

    def forward(self, x):
        self.change(self, x)
        result = x * self.weight + self.use(self)
        return result, F.mse_loss(result, x)


def change_part(net, x):
    net.mean.add_(x)


def change_whole(net, x):
    net.stats.add_(x)


def copy_to_view(net, x):
    net.view.copy_(x.repeat(2))


@pytest.mark.parametrize(
    "change, use, changed, name",
    [
        (change_part, lambda net: net.stats.sum(), "mean", "'stats'"),
        (change_whole, lambda net: net.other, "stats", "'other'"),
        (change_part, lambda net: net.view[:2], "mean", "the attribute 'view'"),
        (change_whole, lambda net: net.view.sum() + 1, "stats", "the attribute 'view'"),
        (copy_to_view, lambda net: net.mean * 1, "view", "'mean'"),
    ],
)
@pytest.mark.parametrize("kind", [poptorch.inferenceModel, trained])
def test_buffers_that_share_memory(kind, change, use, changed, name):
    message = f"forward changes .*'{changed}', which shares memory with {name}"
    with pytest.raises(poptorch.Error, match=message):
        kind(Statistics(change, use))(torch.ones(2))


@pytest.mark.parametrize(
    "change, use",
    [
        (change_part, lambda net: net.other + 1),
        (change_part, lambda net: net.mean),
        (lambda net, x: None, lambda net: net.stats.sum() + net.mean + net.view[0]),
        (lambda net, x: net.stats[0].add_(x), lambda net: net.stats.sum()),
    ],
)
def test_buffers_that_nothing_changes_or_reads(change, use):
    net, other = Statistics(change, use), Statistics(change, use)
    model = poptorch.inferenceModel(net)
    for _ in range(3):
        torch.testing.assert_close(model(torch.ones(2)), other(torch.ones(2)))
    model.copyWeightsToHost()
    torch.testing.assert_close(dict(net.named_buffers()), dict(other.named_buffers()))


class Alias(nn.Linear):
    def __init__(self, read):
        super().__init__(2, 2, bias=False)
        self.wt, self.known = self.weight.detach().t(), [self.weight.data[0]]
        self.read = read

    def forward(self, x):
        result = super().forward(x)
        return result + self.read(self), F.mse_loss(result, x)


@pytest.mark.parametrize(
    "read, name",
    [
        (lambda net: net.wt, "wt"),
        (lambda net: net.wt * 1 + 1, "wt"),
        (lambda net: net.known[0], "known"),
    ],
)
def test_an_attribute_that_shows_a_weight(read, name):
    message = rf"training changes 'weight'.*the attribute '{name}'\..*in forward.*self.weight.t\(\)"
    with pytest.raises(poptorch.Error, match=message):
        trained(Alias(read))(torch.ones(1, 2))
    net = Alias(read)
    torch.testing.assert_close(poptorch.inferenceModel(net)(X[:, :2]), net(X[:, :2]))


@pytest.mark.parametrize(
    "read", [lambda net: net.weight.t(), lambda net: torch.ones(net.wt.shape[0]) * net.wt.size(1)]
)
def test_an_attribute_whose_values_forward_does_not_read(read):
    compare(Alias(read), (X[:, :2],))


def test_a_loop_over_a_model_whose_weight_is_read_as_an_attribute():
    net = Alias(lambda net: net.wt)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        net(x)[1].backward()
        optimizer.step()
        return x

    @poptorch.function
    def train(x):
        return poptorch.repeat(2, step, x)

    with pytest.raises(poptorch.Error, match=r"training changes '.*weight', which shares"):
        train(X[:, :2])
