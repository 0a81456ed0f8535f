"""The ops ctc_loss and ctc_loss_grad, against float64 PyTorch."""

import pytest
import torch
from torch.nn import functional as F

from popsim_torch.errors import Error
from tests.ops.one_op import LAYOUTS, dtype_name, run_op

TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
STEPS, CLASSES = 23, 7
# Labels that repeat, and that do not; as many as steps, too many, one, none.
TARGETS = [[1, 2, 3], [3, 3, 5, 5, 5, 1], [4], [], [6, 1] * 4, [2] * 6]
INPUT_LENGTHS = [23, 17, 9, 4, 8, 6]
IMPOSSIBLE = 5


class Case:
    """A batch of log-probabilities with labels, and what PyTorch makes of it in float64."""

    def __init__(self, dtype=torch.float32, *, blank=0, joined=False, zero_infinity=False, scale=2):
        generator = torch.Generator().manual_seed(1)
        items = len(TARGETS)
        logits = scale * torch.randn(STEPS, items, CLASSES, generator=generator).double()
        self.log_probs = logits.log_softmax(2).to(dtype)
        targets = [[(label + blank) % CLASSES for label in labels] for labels in TARGETS]
        self.target_lengths = torch.tensor([len(labels) for labels in targets])
        if joined:
            self.targets = torch.tensor([label for labels in targets for label in labels])
        else:
            most = int(self.target_lengths.max()) + 1
            # What is after an item's labels counts for nothing.
            self.targets = torch.tensor([t + [99] * (most - len(t)) for t in targets])
        self.input_lengths = torch.tensor(INPUT_LENGTHS)
        self.gradient = torch.rand(items, generator=generator).to(dtype)
        self.attributes = {"blank": blank, "zero_infinity": zero_infinity}

    def expected(self, dtype=torch.float64):
        """Return eager PyTorch's losses, and its gradient."""
        log_probs = self.log_probs.to(dtype).contiguous().requires_grad_()
        lengths = self.input_lengths.tolist(), self.target_lengths.tolist()
        targets = self.targets.long().contiguous()
        loss = F.ctc_loss(log_probs, targets, *lengths, reduction="none", **self.attributes)
        loss.backward(self.gradient.to(dtype))
        return loss.detach(), log_probs.grad

    def forward(self):
        dtype = self.log_probs.dtype
        steps, items, _ = self.log_probs.shape
        states = 2 * self.targets.numel() + items
        return run_op(
            "ctc_loss",
            [self.log_probs, self.targets, self.input_lengths, self.target_lengths],
            [(dtype, (items,)), (torch.float32, (steps, states))],
            **self.attributes,
        )

    def backward(self, alpha):
        return run_op(
            "ctc_loss_grad",
            [
                *(self.gradient, self.log_probs, self.targets),
                *(self.input_lengths, self.target_lengths, alpha),
            ],
            [(self.log_probs.dtype, self.log_probs.shape)],
            **self.attributes,
        )[0]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("indices", [torch.int32, torch.int64], ids=dtype_name)
@pytest.mark.parametrize("joined", [False, True], ids=["padded", "joined"])
@pytest.mark.parametrize("blank", [0, 3])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=dtype_name)
def test_against_float64(dtype, blank, joined, indices, layout):
    case = Case(dtype, blank=blank, joined=joined)
    case.log_probs = layout(case.log_probs)
    for name in ("targets", "input_lengths", "target_lengths"):
        setattr(case, name, layout(getattr(case, name).to(indices)))
    expected, expected_gradient = case.expected()
    loss, alpha = case.forward()
    close = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype], "equal_nan": True}
    torch.testing.assert_close(loss.double(), expected, **close)
    gradient = case.backward(layout(alpha))
    torch.testing.assert_close(gradient.double(), expected_gradient, **close)


def test_the_loss_alone():
    case = Case()
    inputs = [case.log_probs, case.targets, case.input_lengths, case.target_lengths]
    outputs = [(torch.float32, (len(TARGETS),)), None]
    (loss,) = run_op("ctc_loss", inputs, outputs, **case.attributes)
    assert torch.equal(loss, case.forward()[0])


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_more_labels_than_steps(zero_infinity):
    case = Case(zero_infinity=zero_infinity)
    loss, alpha = case.forward()
    gradient = case.backward(alpha)[:, IMPOSSIBLE]
    length = INPUT_LENGTHS[IMPOSSIBLE]
    assert loss[IMPOSSIBLE] == (0 if zero_infinity else torch.inf)
    expected = torch.zeros(STEPS, CLASSES)
    expected[:length] = 0 if zero_infinity else torch.nan
    torch.testing.assert_close(gradient, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
@pytest.mark.parametrize("where", [(3, 0, 1), (3, 0, slice(None)), (22, 1, 3), (5, 3, 0)])
def test_infinities_and_nan(where, value, zero_infinity):
    case = Case(zero_infinity=zero_infinity)
    case.log_probs[where] = value
    expected, expected_gradient = case.expected()
    loss, alpha = case.forward()
    torch.testing.assert_close(loss.double(), expected, rtol=2e-6, atol=2e-6, equal_nan=True)
    gradient = case.backward(alpha).double()
    torch.testing.assert_close(gradient, expected_gradient, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("joined", [False, True], ids=["padded", "joined"])
def test_no_steps_and_no_labels(joined):
    case = Case(joined=joined)
    case.targets = torch.zeros((0,) if joined else (6, 0), dtype=torch.int64)
    case.target_lengths = torch.zeros(6, dtype=torch.int64)
    case.input_lengths[2] = 0
    expected, expected_gradient = case.expected()
    loss, alpha = case.forward()
    torch.testing.assert_close(loss.double(), expected, rtol=2e-6, atol=2e-6)
    gradient = case.backward(alpha).double()
    torch.testing.assert_close(gradient, expected_gradient, rtol=2e-6, atol=2e-6)


def test_steps_without_an_alignment():
    """Labels but no steps: the loss is infinite, and there is nothing to have a gradient."""
    case = Case()
    case.input_lengths[0] = 0
    loss, alpha = case.forward()
    assert loss[0] == torch.inf
    assert torch.equal(case.backward(alpha)[:, 0], torch.zeros(STEPS, CLASSES))


def relative_error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


def long_case(scale):
    generator = torch.Generator().manual_seed(2)
    case = Case()
    case.log_probs = (scale * torch.randn(1500, 3, 40, generator=generator)).log_softmax(2)
    case.targets = torch.randint(1, 40, (3, 300), generator=generator)
    case.input_lengths = torch.tensor([1500, 1200, 900])
    case.target_lengths = torch.tensor([300, 20, 150])
    case.gradient = torch.rand(3, generator=generator)
    return case


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_long_sequences_are_closer_than_eager_pytorch(scale):
    case = long_case(scale)
    exact, exact_gradient = case.expected()
    eager, eager_gradient = case.expected(torch.float32)
    loss, alpha = case.forward()
    gradient = case.backward(alpha)
    assert relative_error(loss, exact) <= max(relative_error(eager, exact), 2e-7)
    assert relative_error(gradient, exact_gradient) < 2e-5
    assert relative_error(gradient, exact_gradient) < relative_error(eager_gradient, exact_gradient)


def test_improbable_labels():
    """Each label costs as much as many likely steps."""
    case = Case(scale=60)
    expected, expected_gradient = case.expected()
    loss, alpha = case.forward()
    torch.testing.assert_close(loss.double(), expected, rtol=2e-6, atol=2e-6)
    gradient = case.backward(alpha).double()
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("joined", [False, True], ids=["padded", "joined"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("input_lengths", 24, "input length 24 of item 1 is out of range: log_probs has 23 steps"),
        ("input_lengths", -1, "input length -1 of item 1 is out of range"),
        ("input_lengths", 1 << 40, "input length 1099511627776 of item 1 is out of range"),
        ("target_lengths", -1, "target length -1 of item 1 is out of range"),
        ("target_lengths", 1 << 40, "target length 1099511627776 of item 1 is out of range"),
        ("targets", 7, "target 7 is out of range: log_probs has 7 classes"),
        ("targets", -1, "target -1 is out of range"),
    ],
)
def test_numbers_out_of_range(name, value, message, joined):
    case = Case(joined=joined)
    _, alpha = case.forward()
    numbers = getattr(case, name)
    if name == "targets":
        numbers.view(-1)[1] = value
    else:
        numbers[1] = value
    with pytest.raises(Error, match=message):
        case.forward()
    with pytest.raises(Error, match=message):
        case.backward(alpha)


@pytest.mark.parametrize(
    ("change", "message"),
    [(1, "add up to more than the 24 labels"), (-1, "add up to 23, the concatenated targets have")],
)
def test_concatenated_targets_of_another_length(change, message):
    case = Case(joined=True)
    _, alpha = case.forward()
    case.target_lengths[1] += change
    with pytest.raises(Error, match=message):
        case.forward()
    with pytest.raises(Error, match=message):
        case.backward(alpha)
