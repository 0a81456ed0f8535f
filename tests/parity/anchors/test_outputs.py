"""Model outputs follow the rules of anchors."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import OutputMode
from tests.parity.anchors.common import (
    MICRO_BATCH,
    TOLERANCE,
    Eager,
    make_batch,
    make_net,
    make_options,
)

OUTPUT_SHAPES = [
    (OutputMode.Final, 1, (MICRO_BATCH, 3), ()),
    (OutputMode.Sum, 1, (MICRO_BATCH, 3), ()),
    (OutputMode.All, 1, (8 * MICRO_BATCH, 3), (8,)),
    (OutputMode.EveryN, 1, (8 * MICRO_BATCH, 3), (8,)),
    (OutputMode.EveryN, 2, (4 * MICRO_BATCH, 3), (4,)),
    (OutputMode.EveryN, 4, (2 * MICRO_BATCH, 3), (2,)),
]


@pytest.mark.parametrize("mode, period, out_shape, loss_shape", OUTPUT_SHAPES)
def test_outputs_of_training(mode, period, out_shape, loss_shape):
    d, ga = 4, 2
    net = make_net()
    twin = copy.deepcopy(net)
    options = make_options(d, ga)
    options.outputMode(mode, period)
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.125))
    x, y = make_batch(d, ga)
    out, loss = model(x, y)
    eager = Eager(twin, torch.optim.SGD(twin.parameters(), lr=0.125), d, ga, x, y)
    assert (tuple(out.shape), tuple(loss.shape)) == (out_shape, loss_shape)
    for actual, name in ((out, "fc2/Gemm:0"), (loss, "loss/Nll:0")):
        expected = eager.expected(name, mode, period, d, ga)
        torch.testing.assert_close(actual, expected, **TOLERANCE)


@pytest.mark.parametrize("mode", [OutputMode.All, OutputMode.EveryN, OutputMode.Final])
def test_a_loss_of_a_single_micro_batch_is_zero_dimensional(mode):
    net = make_net()
    options = make_options()
    options.outputMode(mode, 1)
    model = poptorch.trainingModel(net, options)
    assert model(*make_batch(1, 1))[1].shape == ()


@pytest.mark.parametrize("mode, entries", [("All", [0, 1, 2, 3]), ("Final", [3]), ("Sum", None)])
def test_outputs_of_inference(mode, entries):
    net = make_net()
    x, y = make_batch(4, 1)
    options = make_options(4)
    options.outputMode(OutputMode[mode])
    out, loss = poptorch.inferenceModel(net, options)(x, y)
    with torch.no_grad():
        parts = [net(x[i : i + 4], y[i : i + 4]) for i in range(0, 16, 4)]
    if entries is None:
        expected = sum(p[0] for p in parts), sum(p[1] for p in parts)
    elif len(entries) == 1:
        expected = parts[3]
    else:
        expected = torch.cat([p[0] for p in parts]), torch.stack([p[1] for p in parts])
    torch.testing.assert_close(out, expected[0], **TOLERANCE)
    torch.testing.assert_close(loss, expected[1], **TOLERANCE)


def test_an_output_that_is_a_weight_is_what_forward_saw():
    class Shows(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return self.w, self.w.clone(), poptorch.identity_loss(x * self.w, "sum")

    net = Shows()
    model = poptorch.trainingModel(net, make_options(), poptorch.optim.SGD(net.parameters(), lr=1))
    weight, copied, _ = model(torch.ones(1, 2))
    assert weight.tolist() == [1.0, 1.0]
    assert copied.tolist() == [1.0, 1.0]
    assert net.w.tolist() == [0.0, 0.0]


def test_an_anchored_view_of_a_weight_is_a_forward_value():
    class Shows(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, 1))

        def forward(self, x):
            with poptorch.NameScope("flat"):
                flat = self.w.reshape(2)
            return poptorch.identity_loss(x * flat, "sum")

    options = make_options(2)
    options.anchorTensor("flat", "flat/Reshape:0", OutputMode.All)
    options.anchorTensor("w", "w", OutputMode.All)
    net = Shows()
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=1))
    model(torch.ones(2, 2))
    assert model.getAnchoredTensor("flat").tolist() == [1.0, 1.0, 0.0, 0.0]
    assert model.getAnchoredTensor("w").flatten().tolist() == [1.0, 1.0, 0.0, 0.0]


class SetUp(nn.Module):
    """A weight beside work that is done once, before the first run."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x):
        fixed = torch.arange(2.0, device=x.device).cumsum(0).cumsum(0)
        out = x * self.w + fixed
        return self.w, out, poptorch.identity_loss(out, "sum")


def test_a_weight_beside_setup_work_can_be_returned():
    model = poptorch.inferenceModel(SetUp(), make_options(2))
    weight, out, _ = model(torch.zeros(2, 2))
    assert weight.tolist() == [1.0] * 4
    assert out.tolist() == [[0.0, 1.0], [0.0, 1.0]]


def test_the_seed_of_the_loss_beside_setup_work_can_be_anchored():
    net = SetUp()
    options = make_options(2)
    options.anchorTensor("seed", "Gradient___IdentityLoss:0", OutputMode.All)
    options.anchorTensor("w", "w", OutputMode.All)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=1.0, loss_scaling=4.0)
    model = poptorch.trainingModel(net, options, optimizer)
    model(torch.ones(2, 2))
    assert model.getAnchoredTensor("seed").tolist() == [4.0, 4.0]
    assert model.getAnchoredTensor("w").tolist() == [1.0, 1.0, 0.0, 0.0]


def test_a_buffer_cloned_before_it_changes_keeps_its_old_value():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            before = self.count.clone()
            self.count.add_(1)
            return before, self.count, x

    model = poptorch.inferenceModel(Counts(), make_options(3))
    before, after, _ = model(torch.zeros(3, 1))
    assert before.tolist() == [0.0, 1.0, 2.0]
    assert after.tolist() == [1.0, 2.0, 3.0]


def test_constants_can_be_returned_and_anchored():
    class Constant(nn.Module):
        def forward(self, x):
            with poptorch.NameScope("fixed"):
                fixed = torch.ones(2, 2, device=x.device) + torch.ones(2, 2, device=x.device)
            return x, fixed

    options = make_options(3)
    options.anchorTensor("fixed", "fixed/Add:0", OutputMode.Sum)
    model = poptorch.inferenceModel(Constant(), options)
    _, fixed = model(torch.zeros(3, 1))
    assert torch.equal(fixed, torch.full((2, 2), 2.0))
    assert torch.equal(model.getAnchoredTensor("fixed"), torch.full((2, 2), 6.0))
