"""The op ctc_beam_search, against sums over all alignments and a search in Python."""

import math

import pytest
import torch

from popsim_torch.errors import Error, InternalError
from tests.ops.beam_search import all_paths, beam_search
from tests.ops.one_op import LAYOUTS, dtype_name, run_op

TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def decode(log_probs, lengths=None, *, blank=0, width=100, paths=1, read=(0, 1, 2)):
    """Return the results of a search; None for those that are not read.

    The reference searches among log-probabilities; what is none it has no meaning for.
    """
    steps, items, _ = log_probs.shape
    if lengths is None:
        lengths = torch.full((items,), steps)
    shapes = [(items, paths), (items, paths), (items, paths, steps)]
    dtypes = [log_probs.dtype, torch.int64, torch.int64]
    outputs = [
        pair if i in read else None for i, pair in enumerate(zip(dtypes, shapes, strict=True))
    ]
    return run_op(
        *("ctc_beam_search", [log_probs, lengths], outputs),
        **{"blank": blank, "beam_width": width, "top_paths": paths},
        has_reference=bool((log_probs <= 0).all()),
    )


def found_of(results, item, blank=0):
    """Return the paths of an item that there are, with their log-probabilities."""
    found = {}
    for value, length, labels in zip(*(result[item] for result in results), strict=True):
        assert (labels[length:] == blank).all()
        if value > -math.inf:
            found[tuple(labels[:length].tolist())] = float(value)
    return found


def assert_same(found, expected, tolerance=1e-6):
    """Compare paths in their order, and log-probabilities."""
    assert list(found) == list(expected)
    for path, value in expected.items():
        assert found[path] == pytest.approx(value, rel=tolerance, abs=tolerance)


def random(steps, items, classes, *, scale=2.0, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(steps, items, classes, generator=generator)).log_softmax(2)


def ranked(paths, count):
    return dict(sorted(paths.items(), key=lambda item: -item[1])[:count])


@pytest.mark.parametrize("blank", [0, 1, 2])
@pytest.mark.parametrize(("steps", "classes"), [(1, 3), (2, 3), (5, 3), (6, 3), (4, 4), (7, 2)])
def test_a_wide_beam_is_exact(steps, classes, blank):
    """Every path, with the sum over all of its alignments."""
    blank = min(blank, classes - 1)
    log_probs = random(steps, 3, classes)
    exact = [all_paths(log_probs[:, i].tolist(), blank) for i in range(3)]
    count = len(exact[0])
    results = decode(log_probs, blank=blank, width=2000, paths=count + 2)
    for i in range(3):
        assert_same(found_of(results, i, blank), ranked(exact[i], count))
    # All paths together are certain, and there are no others.
    assert results[0].exp().sum(1).tolist() == pytest.approx([1.0] * 3)
    assert (results[0][:, count:] == -math.inf).all() and (results[1][:, count:] == 0).all()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("indices", [torch.int32, torch.int64], ids=dtype_name)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=dtype_name)
def test_against_a_search_in_python(dtype, indices, layout):
    log_probs = random(25, 4, 6).to(dtype)
    lengths = torch.tensor([25, 0, 13, 1])
    results = decode(layout(log_probs), layout(lengths.to(indices)), width=12, paths=5)
    for i, length in enumerate(lengths.tolist()):
        expected = beam_search(log_probs[:length, i].tolist(), 0, 12)
        found = found_of(results, i)
        # What is as likely in the type of the result may be in any order among itself.
        assert set(found) == set(list(expected)[:5])
        assert_same(found, {path: expected[path] for path in found}, TOLERANCES[dtype])
        assert results[0][i].tolist() == sorted(results[0][i].tolist(), reverse=True)


@pytest.mark.parametrize("width", [1, 2, 3, 7, 40, 100])
@pytest.mark.parametrize("scale", [0.3, 2.0, 6.0])
def test_widths(width, scale):
    """Paths fall out of the beam and come back into it, while longer ones stay there."""
    log_probs = random(40, 2, 9, scale=scale, seed=width)
    results = decode(log_probs, blank=4, width=width, paths=width)
    for i in range(2):
        assert_same(found_of(results, i, 4), beam_search(log_probs[:, i].tolist(), 4, width))


def test_many_classes():
    """Only the likeliest of them are looked at."""
    log_probs = random(12, 1, 300, scale=3.0)
    results = decode(log_probs, width=5, paths=5)
    assert_same(found_of(results, 0), beam_search(log_probs[:, 0].tolist(), 0, 5))


def certain(*labels, classes=4):
    """Return log-probabilities of one alignment."""
    probabilities = torch.nn.functional.one_hot(torch.tensor(labels), classes).float()
    return probabilities.log().unsqueeze(1)


@pytest.mark.parametrize(
    ("alignment", "path"),
    [
        ((0, 0, 0), ()),
        ((1, 1, 1), (1,)),
        ((1, 0, 1), (1, 1)),
        ((1, 1, 0, 0, 1, 2, 2), (1, 1, 2)),
        ((3, 2, 0, 0, 2, 1), (3, 2, 2, 1)),
    ],
)
def test_a_certain_alignment(alignment, path):
    """Its labels, repeated ones apart where there is a blank between them; nothing else can be."""
    probability, length, labels = decode(certain(*alignment), paths=2)
    assert probability.tolist() == [[0.0, -math.inf]]
    assert length.tolist() == [[len(path), 0]]
    padding = [0] * (len(alignment) - len(path))
    assert labels.tolist() == [[[*path, *padding], [0] * len(alignment)]]


def test_the_best_path_is_not_the_best_alignment():
    """Two alignments of a label are likelier together than the blanks alone."""
    log_probs = torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log().unsqueeze(1)
    probability, length, labels = decode(log_probs, paths=2)
    assert probability.exp()[0].tolist() == pytest.approx([0.64, 0.36])
    assert length.tolist() == [[1, 0]] and labels.tolist() == [[[1, 0], [0, 0]]]


def test_blanks_alone():
    """There is one class, and one path."""
    probability, length, labels = decode(torch.full((5, 2, 1), -0.5), width=4, paths=2)
    assert probability.tolist() == [[-2.5, -math.inf]] * 2
    assert length.tolist() == [[0, 0]] * 2 and not labels.any()


def test_no_steps():
    probability, length, labels = decode(random(3, 2, 4), torch.tensor([0, 0]), blank=2, paths=2)
    assert probability.tolist() == [[0.0, -math.inf]] * 2
    assert length.tolist() == [[0, 0]] * 2 and (labels == 2).all()


def test_equally_likely_paths():
    """By the order of their beginnings, then the shorter one, then the smaller label."""
    even = torch.zeros(1, 1, 4)
    _, length, labels = decode(even, blank=1, paths=4)
    assert length.tolist() == [[0, 1, 1, 1]]
    assert labels[0].tolist() == [[1], [0], [2], [3]]
    first = torch.tensor([[-9.0, 0.0, 0.0], [-9.0, 0.0, 0.0]]).unsqueeze(1)
    _, _, labels = decode(first, paths=4)
    assert labels[0].tolist() == [[1, 0], [2, 0], [1, 2], [2, 1]]


def test_classes_that_cannot_be():
    log_probs = random(6, 1, 5)
    log_probs[:, :, 3] = -math.inf
    log_probs[2, :, 0] = -math.inf
    log_probs[4, :, 1] = -math.inf
    found = found_of(decode(log_probs, width=2000, paths=400), 0)
    possible = {
        path: value
        for path, value in all_paths(log_probs[:, 0].tolist(), 0).items()
        if value > -math.inf
    }
    assert_same(found, ranked(possible, len(possible)))


def test_a_step_that_cannot_be():
    """No path is left, for that item."""
    log_probs = random(6, 2, 5)
    log_probs[3, 1] = -math.inf
    probability, length, labels = decode(log_probs, paths=3)
    assert probability[1].tolist() == [-math.inf] * 3
    assert not length[1].any() and not labels[1].any()
    assert_same(
        found_of((probability, length, labels), 0),
        ranked(beam_search(log_probs[:, 0].tolist(), 0, 100), 3),
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_probability(value):
    """It makes the item's results NaN, if its step counts."""
    log_probs = random(6, 3, 5)
    log_probs[3, 1:, 2] = value
    probability, length, labels = decode(log_probs, torch.tensor([6, 6, 3]), paths=2)
    assert probability.isnan().tolist() == [[False] * 2, [True] * 2, [False] * 2]
    assert not length[1].any() and not labels[1].any()


def test_scores_that_are_no_probabilities():
    """Scores that were not normalised are added up all the same, however large they are."""
    log_probs = 50 * torch.randn(30, 1, 6, generator=torch.Generator().manual_seed(1))
    expected = beam_search(log_probs[:, 0].tolist(), 0, 20)
    assert_same(found_of(decode(log_probs, width=20, paths=20), 0), expected)
    assert decode(torch.full((4, 1, 3), 3e38))[0].tolist() == [[math.inf]]


@pytest.mark.parametrize("read", [(0,), (1,), (2,), (0, 2)])
def test_results_that_nobody_reads(read):
    log_probs = random(9, 3, 5)
    every = decode(log_probs, paths=2)
    for result, i in zip(decode(log_probs, paths=2, read=read), read, strict=True):
        assert torch.equal(result, every[i])


@pytest.mark.parametrize("length", [-1, 7, 2**40])
def test_lengths_out_of_range(length):
    message = f"length {length} of item 1 is out of range: probs has 6 steps"
    with pytest.raises(Error, match=message):
        decode(random(6, 2, 5), torch.tensor([6, length]))


@pytest.mark.parametrize(
    ("shape", "lengths", "settings", "message"),
    [
        ((6, 5), 5, {}, "input 0 has 3 axes"),
        ((6, 2, 5), 3, {}, "input 1 has shape"),
        ((6, 2, 5), 2, {"blank": 5}, "blank is the number of a class: 5"),
        ((6, 2, 5), 2, {"top_paths": 5}, "the beam is at least as wide as the number of paths"),
        ((6, 2, 5), 2, {"beam_width": 2**24}, "the sequences of labels fit into memory"),
        ((6, 2, 5), 2, {"beam_width": 2**62}, "the sequences of labels fit into memory"),
    ],
)
def test_what_does_not_belong_together(shape, lengths, settings, message):
    attributes = {"blank": 0, "beam_width": 4, "top_paths": 1, **settings}
    inputs = [torch.zeros(shape), torch.zeros(lengths, dtype=torch.int64)]
    with pytest.raises(InternalError, match=message):
        run_op("ctc_beam_search", inputs, [None, None, None], **attributes)
