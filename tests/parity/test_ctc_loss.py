"""CTCLoss in a model: values, gradients and mistakes, against eager PyTorch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch
from tests.parity.compare import EagerTrainer, Loop, assert_close, quiet_options
from tests.parity.tolerances import ONE_PASS, TRAINED

STEPS, CLASSES, ITEMS = 12, 5, 4
INPUT_LENGTHS = (12, 9, 10, 7)
TARGET_LENGTHS = (3, 1, 4, 0)


def batch():
    """Return log-probabilities and padded targets."""
    log_probs = torch.randn(STEPS, ITEMS, CLASSES).log_softmax(2)
    return log_probs, torch.randint(1, CLASSES, (ITEMS, max(TARGET_LENGTHS)))


def joined(targets):
    return torch.cat([row[:n] for row, n in zip(targets, TARGET_LENGTHS, strict=True)])


def lengths(dtype=torch.int64):
    return torch.tensor(INPUT_LENGTHS, dtype=dtype), torch.tensor(TARGET_LENGTHS, dtype=dtype)


class Model(nn.Module):
    """The loss of log-probabilities that it learns, so that their gradient can be anchored."""

    def __init__(self, log_probs, loss):
        super().__init__()
        self.x = nn.Parameter(log_probs.clone())
        self._loss = loss

    def forward(self, *args):
        loss = self._loss(self.x, *args)
        total = (loss * torch.arange(1, 1 + loss.numel()).to(loss.dtype)).sum()
        return loss, poptorch.identity_loss(total if loss.dim() else 2 * loss, "none")


def run(log_probs, loss, *args):
    """Return loss and gradient on the device."""
    options = quiet_options()
    options.anchorTensor("gradient", "Gradient___x")
    model = Model(log_probs, loss)
    training = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0))
    value, _ = training(*args)
    return value, training.getAnchoredTensor("gradient")


def eager(log_probs, loss, *args):
    """Return loss and gradient in float32."""
    model = Model(log_probs.float(), loss)
    value, total = model(*args)
    total.backward()
    return value.detach(), model.x.grad


def check(log_probs, loss, *args):
    """Compare loss and gradient, in training; and the loss, in inference."""
    dtype = log_probs.dtype
    value, gradient = run(log_probs, loss, *args)
    expected, expected_gradient = eager(log_probs, loss, *args)
    assert value.shape == expected.shape
    assert value.dtype == gradient.dtype == dtype
    assert_close(value, expected, ONE_PASS[dtype], "loss")
    assert_close(gradient, expected_gradient, ONE_PASS[dtype], "gradient")
    inference = poptorch.inferenceModel(Model(log_probs, loss), quiet_options())
    assert torch.equal(inference(*args)[0], value)


def settings(**others):
    return lambda *args: F.ctc_loss(*args, **others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["padded", "joined"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_lengths_of_the_device(reduction, form, dtype):
    log_probs, targets = batch()
    targets = joined(targets) if form == "joined" else targets
    check(log_probs.to(dtype), settings(reduction=reduction), targets, *lengths())


@pytest.mark.parametrize("kind", [tuple, list, torch.tensor])
@pytest.mark.parametrize("form", ["padded", "joined"])
def test_known_lengths(form, kind):
    log_probs, targets = batch()
    targets = joined(targets) if form == "joined" else targets

    def loss(x, targets):
        return F.ctc_loss(x, targets, kind(INPUT_LENGTHS), kind(TARGET_LENGTHS))

    check(log_probs, loss, targets)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.float32], ids=str)
def test_element_types_of_integers(dtype):
    log_probs, targets = batch()
    of_lengths = torch.int64 if dtype == torch.float32 else dtype
    check(log_probs, settings(), targets.to(dtype), *lengths(of_lengths))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("known", [False, True])
def test_without_a_batch(known, reduction):
    log_probs, targets = batch()

    def loss(x, targets, *of_device):
        given = ((9,), (4,)) if known else of_device
        return F.ctc_loss(x, targets, *given, reduction=reduction)

    of_device = () if known else (torch.tensor(9), torch.tensor(4))
    check(log_probs[:, 0], loss, targets[0], *of_device)


def test_another_blank():
    log_probs, targets = batch()
    check(log_probs, nn.CTCLoss(blank=CLASSES - 1), targets - 1, *lengths())


@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_more_labels_than_steps(reduction, zero_infinity):
    log_probs, targets = batch()
    input_lengths, target_lengths = lengths()
    input_lengths[2] = 3
    loss = nn.CTCLoss(reduction=reduction, zero_infinity=zero_infinity)
    args = (targets, input_lengths, target_lengths)
    value, gradient = run(log_probs, loss, *args)
    expected, expected_gradient = eager(log_probs, loss, *args)
    torch.testing.assert_close(value, expected)
    assert value.isfinite().all() == zero_infinity
    torch.testing.assert_close(gradient, expected_gradient, equal_nan=True)


def test_the_function_of_torch():
    log_probs, targets = batch()

    def loss(x, targets, input_lengths, target_lengths):
        return torch.ctc_loss(
            x, targets, target_lengths=target_lengths, input_lengths=input_lengths, blank=0
        )

    check(log_probs, loss, targets, *lengths())


class Recogniser(nn.Module):
    """A recurrent network, and the loss of what it reads."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(6, 8, batch_first=True, bidirectional=True)
        self.last = nn.Linear(16, CLASSES)
        self.loss = nn.CTCLoss(zero_infinity=True)

    def forward(self, x, targets, input_lengths, target_lengths):
        y = self.last(self.gru(x)[0]).log_softmax(2)
        return y, self.loss(y.transpose(0, 1), targets, input_lengths, target_lengths)


def recordings(count):
    input_lengths = torch.randint(STEPS // 2, STEPS + 1, (count,))
    targets = torch.randint(1, CLASSES, (count, 4))
    return torch.randn(count, STEPS, 6), targets, input_lengths, torch.randint(0, 5, (count,))


@pytest.mark.parametrize("loop", [Loop(), Loop(3, 2)], ids=str)
def test_training(loop):
    model = Recogniser()
    twin = copy.deepcopy(model)
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, loop.options(), optimizer)
    trainer = EagerTrainer(twin, torch.optim.Adam(twin.parameters(), lr=0.01), loop)
    for _ in range(5):
        inputs = recordings(ITEMS * loop.micro_batches)
        _, loss = training(*inputs)
        call = trainer(*inputs)
        torch.testing.assert_close(loss.mean(), call.losses[-1], rtol=1e-4, atol=1e-5)
    training.copyWeightsToHost()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(ours, theirs, TRAINED[torch.float32])


@pytest.mark.parametrize("training", [False, True])
def test_names(training):
    model = Recogniser()
    if training:
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
        executor = poptorch.trainingModel(model, quiet_options(), optimizer)
    else:
        executor = poptorch.inferenceModel(model, quiet_options())
    executor.compile(*recordings(ITEMS))
    names = executor.getTensorNames()
    assert "loss/Ctc:0" in names
    assert ("Gradient___loss/Ctc:0" in names) == training


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (2, STEPS + 1, f"input length {STEPS + 1} of item 2 is out of range"),
        (2, -1, "input length -1 of item 2 is out of range"),
        (3, 5, "target length 5 of item 2 is out of range"),
        (1, CLASSES, f"target {CLASSES} is out of range: log_probs has {CLASSES} classes"),
    ],
)
def test_numbers_out_of_range_fail_the_run(position, value, message):
    """The next run is right again."""
    model = Recogniser()
    twin = copy.deepcopy(model)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, quiet_options(), optimizer)
    good = recordings(ITEMS)
    bad = [x.clone() for x in good]
    bad[3][:] = 4
    bad[position][2] = value
    where = r"while running '.*' \(ctc_loss, .*test_ctc_loss\.py:\d+\): "
    with pytest.raises(poptorch.Error, match=where + ".*" + message):
        training(*bad)
    torch.testing.assert_close(training(*good)[1], twin(*good)[1].detach(), rtol=1e-5, atol=1e-6)


MISTAKES = {
    "input length": (
        (None, None, (13, 9, 10, 7), TARGET_LENGTHS),
        "from 0 to 12, but got value 13",
    ),
    "target length": ((None, None, INPUT_LENGTHS, (3, 1, -4, 0)), "from 0 to 4, but got value -4"),
    "input lengths": ((None, None, INPUT_LENGTHS[:3], TARGET_LENGTHS), "input_lengths must be of"),
    "target lengths": ((None, None, INPUT_LENGTHS, (3,)), "target_lengths must be of size batch"),
    "blank": ((None, None, INPUT_LENGTHS, TARGET_LENGTHS, 5), "blank must be in label range"),
    "targets": (
        (None, torch.ones(3, 4).long(), INPUT_LENGTHS, TARGET_LENGTHS),
        r"targets must have shape \(batch, labels\) with a batch of 4, .* got shape \(3, 4\)",
    ),
    "log_probs": (
        (torch.zeros(4), None, INPUT_LENGTHS, TARGET_LENGTHS),
        r"log_probs must have 3 dimensions .* got shape \(4,\)",
    ),
    "joined targets": (
        (None, torch.ones(9).long(), INPUT_LENGTHS, TARGET_LENGTHS),
        "add up to 8, but the concatenated targets have 9 labels",
    ),
    "integers": (
        (torch.zeros(12, 4, 5).long(), None, INPUT_LENGTHS, TARGET_LENGTHS),
        "log_probs must be floating-point, got torch.int",
    ),
    "empty": ((torch.zeros(0, 4, 5), None, (0,) * 4, TARGET_LENGTHS), "must not be empty"),
    "floating": (
        (None, None, torch.tensor([12.0, 9.0, 10.0, 7.0]), torch.tensor(TARGET_LENGTHS)),
        "input_lengths must be integral",
    ),
}


@pytest.mark.parametrize(("given", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_found_when_compiling(given, message):
    log_probs, targets = batch()
    x, labels, *others = given
    x = log_probs if x is None else x
    labels = targets if labels is None else labels

    def loss(scale):
        return F.ctc_loss(x * scale.to(x.dtype), labels, *others)

    class Wrong(nn.Module):
        def forward(self, scale):
            return loss(scale)

    with pytest.raises(RuntimeError):
        loss(torch.ones(1))
    with pytest.raises(RuntimeError, match=message):
        poptorch.inferenceModel(Wrong(), quiet_options())(torch.ones(1))


@pytest.mark.parametrize("given", [(INPUT_LENGTHS, torch.tensor(TARGET_LENGTHS)), (12, 4)])
def test_lengths_of_other_kinds(given):
    class Wrong(nn.Module):
        def forward(self, log_probs, targets):
            return F.ctc_loss(log_probs, targets, *given)

    with pytest.raises(TypeError, match="invalid combination of arguments"):
        poptorch.inferenceModel(Wrong(), quiet_options())(*batch())


def test_the_gradient_of_a_gradient_is_refused():
    class Twice(nn.Module):
        def __init__(self, log_probs):
            super().__init__()
            self.x = nn.Parameter(log_probs)

        def forward(self, targets, *of_device):
            loss = F.ctc_loss(self.x, targets, *of_device)
            (slope,) = torch.autograd.grad(loss, self.x, create_graph=True)
            return poptorch.identity_loss(slope.square().sum(), "none")

    log_probs, targets = batch()
    model = Twice(log_probs)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, quiet_options(), optimizer)
    with pytest.raises(poptorch.Error, match=r"not supported for ctc_loss.*CTCLoss"):
        training(targets, *lengths())


def test_floating_point_exceptions_see_an_infinite_loss():
    options = quiet_options()
    options.Precision.enableFloatingPointExceptions(True)
    log_probs, targets = batch()
    model = poptorch.inferenceModel(Model(log_probs, F.ctc_loss), options)
    input_lengths, target_lengths = lengths()
    expected = F.ctc_loss(log_probs, targets, input_lengths, target_lengths)
    torch.testing.assert_close(model(targets, input_lengths, target_lengths)[0], expected)
    input_lengths[2] = 1
    with pytest.raises(poptorch.Error, match=r"ctc_loss.*has an infinity at \(2\)"):
        model(targets, input_lengths, target_lengths)
