"""``fps``, ``nearest`` and ``ctc_beam_search_decoder``: arguments, and what runs on the host."""

import math

import pytest
import torch

import popsim_torch as poptorch
from tests.parity.compare import quiet_options

X = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 3.0], [5.0, 5.0]])
LOG_PROBS = torch.zeros(6, 2, 3).log_softmax(2)
LENGTHS = torch.tensor([6, 4])


def test_fps_by_hand():
    assert poptorch.fps(X, [0, 4]).tolist() == [0, 3]
    assert poptorch.fps(X, [0, 4], 0.75).tolist() == [0, 3, 2]
    assert poptorch.fps(X, [0, 2, 4], ratio=1).tolist() == [0, 1, 2, 3]
    assert poptorch.fps(src=X[:, 1], ptr=(0, 4), ratio=0.6).tolist() == [0, 3, 2]


def test_nearest_by_hand():
    y = torch.tensor([[4.0, 4.0], [0.0, 1.0], [0.0, 2.0]])
    assert poptorch.nearest(X, y).tolist() == [1, 1, 2, 0]
    assert poptorch.nearest(X, y, [0, 0, 1, 1], [0, 0, 1]).tolist() == [1, 1, 2, 2]
    assert poptorch.nearest(x=X[:, 0], y=y[:, 0]).tolist() == [1, 1, 1, 0]


def test_the_decoder_by_hand():
    log_probs = torch.tensor([[0.4, 0.6, 0.0], [0.9, 0.1, 0.0], [0.0, 0.3, 0.7]]).log()
    results = poptorch.ctc_beam_search_decoder(log_probs.unsqueeze(1), torch.tensor([3]))
    assert isinstance(results, tuple)
    probability, length, path = results
    # The sequences "1, blank, 2" and "1, 1, 2" are one path.
    assert probability.exp().tolist() == [
        [pytest.approx(0.7 * (0.6 * 0.9 + 0.6 * 0.1 + 0.4 * 0.1))]
    ]
    assert length.tolist() == [[2]]
    assert path.tolist() == [[[1, 2, 0]]]
    assert length.dtype == path.dtype == torch.int64


@pytest.mark.parametrize("ratio", [1e-9, 0.1, 0.25, 0.3, 0.5, 0.999, 1, 1.0])
@pytest.mark.parametrize("size", [1, 3, 10])
def test_how_many_points(ratio, size):
    rows = poptorch.fps(torch.randn(12, 2), [0, 0, size, 12], ratio)
    counts = [math.ceil(ratio * n) for n in (size, 12 - size)]
    assert len(rows) == sum(counts)
    assert ((rows < size).sum(), (rows >= size).sum()) == tuple(counts)


def test_points_outside_of_all_segments_are_left_out():
    assert sorted(poptorch.fps(torch.randn(9, 2), [2, 4, 7], 1.0).tolist()) == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_types_on_the_host(dtype):
    x = X.to(dtype).requires_grad_()
    rows = poptorch.fps(x, [0, 4])
    assert rows.tolist() == [0, 3] and rows.dtype == torch.int64 and not rows.requires_grad
    assert poptorch.nearest(x, x.flip(0)).tolist() == [3, 2, 1, 0]
    probability, _, _ = poptorch.ctc_beam_search_decoder(
        LOG_PROBS.to(dtype).requires_grad_(), LENGTHS
    )
    expected = torch.float32 if dtype == torch.float64 else dtype
    assert probability.dtype == expected and not probability.requires_grad


def test_random_starts_on_the_host_are_torchs():
    x = torch.arange(64.0)
    starts = []
    for seed in (1, 2, 3, 1):
        torch.manual_seed(seed)
        starts.append(int(poptorch.fps(x, [0, 64], 1 / 64, random_start=True)))
    assert starts[0] == starts[3] and len(set(starts)) == 3


def test_arguments_are_left_alone():
    x, ptr, batch = X.clone().t(), [0, 2], [0, 1]
    poptorch.fps(x, ptr)
    poptorch.nearest(x, x, batch, batch)
    assert torch.equal(x, X.t()) and ptr == [0, 2] and batch == [0, 1]


# Mistakes: on the host, and in a model

WRONG_TYPES = {
    "src": (lambda x: poptorch.fps([1.0], [0, 1]), "src must be a torch.Tensor, got list of float"),
    "src of integers": (lambda x: poptorch.fps(x.int(), [0, 4]), "src must be floating-point"),
    "ptr": (lambda x: poptorch.fps(x, x), "ptr must be a list of Python ints, got Tensor"),
    "ptr of numbers": (lambda x: poptorch.fps(x, [0, 2.5]), "got list of float and int"),
    "ptr of booleans": (lambda x: poptorch.fps(x, [False, True]), "got list of bool"),
    "ptr of tensors": (lambda x: poptorch.fps(x, [x, x]), "got list of Tensor"),
    "ratio": (lambda x: poptorch.fps(x, [0, 4], "0.5"), "ratio must be a number, got str"),
    "ratio of the device": (lambda x: poptorch.fps(x, [0, 4], x[0, 0]), "ratio must be a number"),
    "random_start": (lambda x: poptorch.fps(x, [0, 4], 0.5, 1), "True or False, got int"),
    "x": (lambda x: poptorch.nearest(None, x), "x must be a torch.Tensor, got NoneType"),
    "y": (lambda x: poptorch.nearest(x, [0.0]), "y must be a torch.Tensor, got list of float"),
    "y of integers": (lambda x: poptorch.nearest(x, x.int()), "y must be floating-point"),
    "batch_x": (lambda x: poptorch.nearest(x, x, 3), "batch_x must be a list of Python ints"),
    "batch_y": (lambda x: poptorch.nearest(x, x, None, [0.0] * 4), "got list of float"),
    "batch of numbers": (
        lambda x: poptorch.nearest(x, x, x[:, 0]),
        "batch_x must be integers, got torch.float32",
    ),
    "probs": (
        lambda x: poptorch.ctc_beam_search_decoder([0.0], LENGTHS),
        "probs must be a torch.Tensor, got list",
    ),
    "lengths": (
        lambda x: poptorch.ctc_beam_search_decoder(LOG_PROBS, [6, 4]),
        "lengths must be a torch.Tensor, got list of int",
    ),
    "probs of integers": (
        lambda x: poptorch.ctc_beam_search_decoder(LOG_PROBS.int(), LENGTHS),
        "probs must be floating-point",
    ),
    "lengths of numbers": (
        lambda x: poptorch.ctc_beam_search_decoder(LOG_PROBS, LENGTHS.float()),
        "lengths must be integers",
    ),
    "blank": (
        lambda x: poptorch.ctc_beam_search_decoder(LOG_PROBS, LENGTHS, 0.0),
        "blank must be an int, got float",
    ),
    "beam_width": (
        lambda x: poptorch.ctc_beam_search_decoder(LOG_PROBS, LENGTHS, beam_width=True),
        "beam_width must be an int, got bool",
    ),
    "top_paths": (
        lambda x: poptorch.ctc_beam_search_decoder(LOG_PROBS, LENGTHS, top_paths=None),
        "top_paths must be an int, got NoneType",
    ),
}


def decode(log_probs=LOG_PROBS, lengths=LENGTHS, **settings):
    return poptorch.ctc_beam_search_decoder(log_probs, lengths, **settings)


WRONG_VALUES = {
    "src": (lambda x: poptorch.fps(x[None], [0, 1]), r"got \(1, 4, 2\)"),
    "a number": (lambda x: poptorch.fps(x[0, 0], [0, 1]), r"got \(\)"),
    "no coordinates": (lambda x: poptorch.fps(x[:, :0], [0, 4]), r"got \(4, 0\)"),
    "short ptr": (lambda x: poptorch.fps(x, [0]), r"two numbers; got \[0\]"),
    "empty ptr": (lambda x: poptorch.fps(x, []), r"two numbers; got \[\]"),
    "falling ptr": (lambda x: poptorch.fps(x, [0, 3, 2]), "ptr must ascend, but 2 follows 3"),
    "negative ptr": (lambda x: poptorch.fps(x, [-1, 3]), "within 0 and 4, .* from -1 to 3"),
    "long ptr": (lambda x: poptorch.fps(x, [0, 5]), "within 0 and 4, .* from 0 to 5"),
    "no ratio": (lambda x: poptorch.fps(x, [0, 4], 0.0), "above 0 and at most 1, got 0.0"),
    "large ratio": (lambda x: poptorch.fps(x, [0, 4], 1.1), "above 0 and at most 1, got 1.1"),
    "NaN ratio": (lambda x: poptorch.fps(x, [0, 4], math.nan), "at most 1, got nan"),
    "empty segments": (lambda x: poptorch.fps(x, [2, 2, 2]), "all segments of ptr are empty"),
    "x": (lambda x: poptorch.nearest(x[None], x), r"x must have shape .* got \(1, 4, 2\)"),
    "coordinates": (
        lambda x: poptorch.nearest(x, x[:, :1]),
        "points of x have 2 coordinates, those of y have 1",
    ),
    "empty y": (lambda x: poptorch.nearest(x, x[:0]), "y has no rows"),
    "batch_x": (
        lambda x: poptorch.nearest(x, x, [0, 0, 0]),
        r"batch_x must have shape \(4,\), a number for each point; got \(3,\)",
    ),
    "batch_y": (
        lambda x: poptorch.nearest(x, x, [0] * 4, torch.zeros(4, 1).long()),
        r"batch_y must have shape \(4,\), a number for each point; got \(4, 1\)",
    ),
    "falling batch": (
        lambda x: poptorch.nearest(x, x, [0, 1, 0, 1]),
        "batch_x must ascend, but 0 follows 1",
    ),
    "missing batch": (
        lambda x: poptorch.nearest(x, x, [0, 1, 2, 3], [0, 1, 1, 3]),
        "x has rows of batch 2, and y has none",
    ),
    "other batches than none": (
        lambda x: poptorch.nearest(x, x, [0, 0, 1, 1]),
        "x has rows of batch 1, and y has none",
    ),
    "probs": (lambda x: decode(LOG_PROBS[0]), r"\(steps, batch, classes\), .* got \(2, 3\)"),
    "empty probs": (lambda x: decode(LOG_PROBS[:0]), r"with elements; got \(0, 2, 3\)"),
    "lengths": (lambda x: decode(lengths=LENGTHS[:1]), r"lengths must have shape \(2,\)"),
    "rank of lengths": (lambda x: decode(lengths=LENGTHS[None]), r"got \(1, 2\)"),
    "blank": (lambda x: decode(blank=3), "blank must be from 0 to 2, got 3"),
    "negative blank": (lambda x: decode(blank=-1), "blank must be from 0 to 2, got -1"),
    "beam_width": (lambda x: decode(beam_width=0), "beam_width must be from 1 to .*, got 0"),
    "large beam_width": (lambda x: decode(beam_width=2**40), "beam_width must be from 1 to"),
    "top_paths": (lambda x: decode(top_paths=0), "top_paths must be from 1, got 0"),
    "many top_paths": (
        lambda x: decode(beam_width=4, top_paths=5),
        "top_paths is 5, but a beam_width of 4 keeps fewer",
    ),
}


class Calls(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, x):
        return self._function(x), x


@pytest.mark.parametrize("in_model", [False, True], ids=["host", "model"])
@pytest.mark.parametrize(
    ("call", "message", "python"),
    [
        *((*use, TypeError) for use in WRONG_TYPES.values()),
        *((*use, ValueError) for use in WRONG_VALUES.values()),
    ],
    ids=[*(f"type of {name}" for name in WRONG_TYPES), *WRONG_VALUES],
)
def test_a_mistake_is_an_error(call, message, python, in_model):
    if in_model:
        call = poptorch.inferenceModel(Calls(call), quiet_options())
    with pytest.raises(poptorch.Error, match=message) as caught:
        call(X)
    assert isinstance(caught.value, python)
