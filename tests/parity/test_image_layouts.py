"""Models whose images lie with their channels last: every tensor comes back as PyTorch has it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch
from popsim_torch.lowering.emit.builder import Builder
from tests.parity.compare import Loop, Pair, assert_close, quiet_options
from tests.parity.tolerances import ONE_PASS, TRAINED

CHANNELS, SIZE, CLASSES, BATCH = 6, 10, 4, 5


class Head(nn.Module):
    """Gives a body of convolutions a linear layer and a loss."""

    def __init__(self, body: nn.Module, features: int) -> None:
        super().__init__()
        self.body = body
        self.linear = nn.Linear(features, CLASSES)

    def forward(self, x, target):
        output = self.linear(self.body(x).flatten(1))
        return output, F.cross_entropy(output, target)


class Views(nn.Module):
    """Looks at images in many ways before it adds them up."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.second = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.scale = nn.Parameter(torch.rand(CHANNELS, 1, 1) + 0.5)
        self.row = nn.Parameter(torch.rand(SIZE))

    def forward(self, x):
        y = torch.relu(self.first(x))
        turned = y.transpose(2, 3).flip(1) * self.row
        cut = torch.cat([y[:, ::2], y[:, 1::2]], 1)
        tokens = y.flatten(2).transpose(1, 2).softmax(-1)
        y = turned + cut * self.scale + tokens.transpose(1, 2).reshape(y.shape)
        y = self.second(y.contiguous(memory_format=torch.channels_last))
        halves = y.chunk(2, 1)
        return torch.stack([halves[0], halves[1].sigmoid()], 1).sum((3, 4))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(CHANNELS)
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(CHANNELS, affine=False)
        self.down = nn.Conv2d(CHANNELS, 8, 1, 2)
        self.norm3 = nn.BatchNorm2d(8, track_running_stats=False)

    def forward(self, x):
        y = torch.relu(self.norm(self.stem(x)))
        y = torch.relu(self.norm2(self.conv(y)) + y)
        return F.adaptive_avg_pool2d(torch.relu(self.norm3(self.down(y))), (2, 3))


class Pools(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.depthwise = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)
        self.up = nn.ConvTranspose2d(CHANNELS, CHANNELS, 2, 2)
        self.last = nn.Conv2d(CHANNELS, CHANNELS, 3)

    def forward(self, x):
        y = F.max_pool2d(torch.relu(self.first(x)), 3, 2, 1)
        y = torch.relu(self.depthwise(y))
        y = F.avg_pool2d(torch.relu(self.up(y)), 2, 1, 1, count_include_pad=False)
        y = F.max_pool2d(torch.tanh(self.last(y)), 2, ceil_mode=True)
        return torch.relu(y)


def make(body: type[nn.Module]) -> Head:
    torch.manual_seed(0)
    module = body()
    features = module(torch.randn(2, 3, SIZE, SIZE)).flatten(1).shape[1]
    return Head(module, features)


def batch(count: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 3, SIZE, SIZE), torch.randint(0, CLASSES, (count,))


BODIES = [Views, Residual, Pools]


@pytest.mark.parametrize("body", BODIES)
def test_training(body):
    loop = Loop(accumulation=2)
    pair = Pair(
        make(body),
        lambda m: poptorch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9),
        tolerance=TRAINED[torch.float32],
        loop=loop,
    )
    for _ in range(5):
        pair.step(*batch(loop.micro_batches * BATCH))
    pair.finish()


@pytest.mark.parametrize("body", BODIES)
def test_float16_is_as_near_to_float64_as_eager_pytorch(body):
    half = make(body).half()
    exact, eager = copy.deepcopy(half).double(), copy.deepcopy(half)
    x, target = batch()
    exact(x.half().double(), target)[1].backward()
    eager(x.half(), target)[1].backward()
    options = quiet_options()
    for name, _ in half.named_parameters():
        options.anchorTensor(name, f"Gradient___{name}")
    optimizer = poptorch.optim.SGD(half.parameters(), lr=0.01)
    device = poptorch.trainingModel(half, options, optimizer)
    device(x.half(), target)
    theirs = dict(eager.named_parameters())
    for name, parameter in exact.named_parameters():
        wanted = parameter.grad
        allowed = 2 * (theirs[name].grad.double() - wanted).abs().max() + 2e-3 * wanted.abs().max()
        ours = device.getAnchoredTensor(name).double()
        assert (ours - wanted).abs().max() <= allowed + 1e-4, name


def all_tensors(body: type[nn.Module], inputs) -> dict[str, torch.Tensor]:
    def wrap(names: list[str]):
        model = make(body)
        options = quiet_options()
        for name in names:
            options.anchorTensor(name, name)
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
        return poptorch.trainingModel(model, options, optimizer)

    first = wrap([])
    first.compile(*inputs)
    names = [name for name in first.getTensorNames() if "___specific___" not in name]
    model = wrap(names)
    model(*inputs)
    return {name: model.getAnchoredTensor(name) for name in names}


@pytest.mark.parametrize("body", BODIES)
def test_every_anchor_is_the_same_in_both_layouts(body, monkeypatch):
    torch.manual_seed(3)
    inputs = batch()
    last = all_tensors(body, inputs)
    monkeypatch.setattr(Builder, "image", Builder.value)
    first = all_tensors(body, inputs)
    assert last.keys() == first.keys()
    assert any(name.startswith("Gradient___body/") for name in first)
    for name, expected in first.items():
        assert last[name].is_contiguous()
        assert_close(last[name], expected, ONE_PASS[torch.float32], name)


class Indices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, CHANNELS, 3)

    def forward(self, x):
        y = self.conv(x)
        pooled, indices = F.max_pool2d(y, 2, return_indices=True)
        return y, pooled, indices, F.max_unpool2d(pooled, indices, 2)


def test_outputs_are_images_as_pytorch_gives_them():
    torch.manual_seed(0)
    model = Indices()
    x = batch()[0]
    expected = model(x)
    actual = poptorch.inferenceModel(model, quiet_options())(x)
    for ours, wanted in zip(actual, expected, strict=True):
        assert ours.is_contiguous()
        assert_close(ours, wanted.to(ours.dtype), ONE_PASS[torch.float32])


@pytest.mark.parametrize("trained", [False, True])
def test_batch_norm_with_fixed_statistics(trained):
    """In eval mode, also where the layers around it are trained."""
    model = make(Residual)
    for norm in (model.body.norm, model.body.norm2):
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.5, 2)
    x, target = batch()
    if not trained:
        model.eval()
        output, loss = poptorch.inferenceModel(model, quiet_options())(x, target)
        wanted = model(x, target)
        assert_close(output, wanted[0], ONE_PASS[torch.float32])
        assert_close(loss, wanted[1], ONE_PASS[torch.float32])
        return
    before = model.body.norm.train
    model.body.norm.train = lambda mode=True: before(False)
    model.train()
    assert not model.body.norm.training
    reference = [p.detach().clone() for p in model.parameters()]
    _, expected = model(x, target)
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0)
    device = poptorch.trainingModel(model, quiet_options(), optimizer)
    _, loss = device(x, target)
    assert_close(loss, expected, ONE_PASS[torch.float32])
    device.copyWeightsToHost()
    for p, start, gradient in zip(model.parameters(), reference, gradients, strict=True):
        torch.testing.assert_close(p.detach(), start - gradient, rtol=1e-4, atol=1e-5)
