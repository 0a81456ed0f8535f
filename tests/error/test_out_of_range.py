"""Numbers that are not positions: a program fails if eager PyTorch does, and says where."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch
from tests.ops.num_threads import threads
from tests.options import make_options

LARGEST = 2**63 - 1
BAD = [1000, -1000, LARGEST, -LARGEST - 1]
X = torch.arange(20.0).reshape(5, 4)
GOOD = torch.tensor([3, 1])


def assigned(x, index):
    x = x.clone()
    x[index] = 9.0
    return x


def wide(i):
    """Return the same positions for each column of X."""
    return i.reshape(-1, 1).expand(-1, 4)


def ones(i):
    return torch.ones(i.numel(), 4)


# The first number of `i` is a valid position, the second one is the tested number.
FUNCTIONS = {
    "position": lambda x, i: x[i[1]],
    "position of the last axis": lambda x, i: x[..., i[1]],
    "two positions": lambda x, i: x[i[0], i[1]],
    "position and slice": lambda x, i: x[1:3, i[1]],
    "position that is assigned to": lambda x, i: assigned(x, i[1]),
    "part of a position that is assigned to": lambda x, i: assigned(x, (i[1], slice(1, 3))),
    "positions": lambda x, i: x[i],
    "positions that are assigned to": lambda x, i: assigned(x, i),
    "index_put": lambda x, i: x.index_put((i,), ones(i), accumulate=True),
    "index_fill": lambda x, i: x.index_fill(0, i, 2.0),
    "index_copy": lambda x, i: x.index_copy(0, i, ones(i)),
    "index_add": lambda x, i: x.index_add(0, i, ones(i)),
    "index_reduce": lambda x, i: x.index_reduce(0, i, ones(i), "mean"),
    "index_select": lambda x, i: x.index_select(0, i),
    "index_select of the last axis": lambda x, i: x.index_select(-1, i),
    "gather": lambda x, i: x.gather(0, wide(i)),
    "take": lambda x, i: x.take(i),
    "put": lambda x, i: x.put(i, torch.ones(2)),
    "take_along_dim": lambda x, i: torch.take_along_dim(x, i.reshape(-1, 1), 0),
    "scatter": lambda x, i: x.scatter(0, wide(i), 1.0),
    "scatter of a tensor": lambda x, i: x.scatter(0, wide(i), ones(i)),
    "scatter_add": lambda x, i: x.scatter_add(0, wide(i), ones(i)),
    "scatter_reduce": lambda x, i: x.scatter_reduce(0, wide(i), ones(i), "amax"),
    "embedding": lambda x, i: F.embedding(i, x),
    "embedding of whole numbers": lambda x, i: F.embedding(i, x.int()),
    "embedding_bag": lambda x, i: F.embedding_bag(i.reshape(1, -1), x),
    "one_hot": lambda x, i: F.one_hot(i, 5),
    "nll_loss": lambda x, i: F.nll_loss(x[:2], i),
    "nll_loss of images": lambda x, i: F.nll_loss(x.reshape(1, 5, 2, 2)[:, :, :1], i[None, None]),
    "multi_margin_loss": lambda x, i: F.multi_margin_loss(x[:2], i),
    "max_unpool": lambda x, i: F.max_unpool1d(x[:1, :2][None], i[None, None], 2),
    "histc": lambda x, i: torch.histc(i.float(), 5, 0, 4),
    "unravel_index": lambda x, i: torch.stack(torch.unravel_index(i, (5, 4))),
}
EVERY_FUNCTION = pytest.mark.parametrize("name", FUNCTIONS)


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, *args):
        return self._function(*args)


def inference(function):
    return poptorch.inferenceModel(Model(function), make_options())


def outcome(function, *args):
    """Return the result of a call; None if it fails."""
    try:
        return function(*args)
    except (IndexError, RuntimeError, ValueError):
        return None


def check(model, function, bad):
    """Check that a model fails if eager PyTorch fails, and is correct before and after that."""
    indices = torch.tensor([GOOD[0].item(), bad])
    expected = outcome(function, X, indices)
    if expected is None:
        where = rf"(?s)while running '.*' \(\w+, .*test_out_of_range\.py:\d+\): .*{bad}\b"
        with pytest.raises(poptorch.Error, match=where):
            model(X, indices)
    else:
        torch.testing.assert_close(model(X, indices), expected, check_dtype=False)
    torch.testing.assert_close(model(X, GOOD), function(X, GOOD), check_dtype=False)


@EVERY_FUNCTION
def test_it_fails_where_eager_fails(name):
    function = FUNCTIONS[name]
    for num_threads in (1, 2):
        with threads(num_threads):
            model = inference(function)
            for bad in (-1, *BAD):
                check(model, function, bad)


def test_labels_of_the_multilabel_loss_end_at_minus_one():
    def function(x, i):
        return F.multilabel_margin_loss(x[:1, :2], i[None])

    model = inference(function)
    labels = torch.tensor([1, -1])
    torch.testing.assert_close(model(X, labels), function(X, labels))
    for bad in (-2, 2, *BAD):
        with pytest.raises(poptorch.Error, match=rf"test_out_of_range\.py:\d+\): .*{bad}\b"):
            model(X, torch.tensor([bad, 1]))


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("assigns", [False, True])
def test_a_position_in_a_loop(assigns, bad):
    def function(x, i):
        def body(y):
            return assigned(y, i[1]) + 1 if assigns else y + y[i[1]]

        return poptorch.for_loop(2, body, [x])[0]

    model = inference(function)
    where = (
        rf"test_out_of_range\.py:\d+\): index {bad} is out of bounds for dimension 0 with size 5"
    )
    with pytest.raises(poptorch.Error, match=where):
        model(X, torch.tensor([0, bad]))
    expected = X
    for _ in range(2):
        expected = assigned(expected, 1) + 1 if assigns else expected + expected[1]
    assert torch.equal(model(X, GOOD), expected)


def test_a_position_that_a_loop_counts_up_ends_at_the_end():
    def function(x, start):
        def body(position, total):
            return position + 1, total + x[position]

        return poptorch.for_loop(3, body, [start, torch.zeros(4)])[1]

    model = inference(function)
    assert torch.equal(model(X, torch.tensor(2)), X[2:].sum(0))
    with pytest.raises(
        poptorch.Error, match="index 5 is out of bounds for dimension 0 with size 5"
    ):
        model(X, torch.tensor(3))
    assert torch.equal(model(X, torch.tensor(-3)), X[2:].sum(0))


@pytest.mark.parametrize("bad", BAD)
def test_a_position_in_training(bad):
    class Chooser(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(X.clone())

        def forward(self, i):
            row = self.table[i]
            return row, poptorch.identity_loss((row * row).sum(), "none")

    net = Chooser()
    model = poptorch.trainingModel(net, make_options(), torch.optim.SGD(net.parameters(), lr=0.5))
    with pytest.raises(poptorch.Error, match=rf"index {bad} is out of bounds"):
        model(torch.tensor(bad))
    model(torch.tensor(-1))
    expected = X.clone()
    expected[-1] = 0  # w - 0.5 * 2 w
    assert torch.equal(net.table.detach(), expected)


COUNTS = {
    "plain": lambda x, i: torch.bincount(i, minlength=8),
    "weights": lambda x, i: torch.bincount(i, x[0, :2], minlength=8),
    "method": lambda x, i: i.bincount(minlength=8),
    "of 32 bits": lambda x, i: torch.bincount(i.int(), minlength=8),
}


@pytest.mark.parametrize("bad", [-1, -1000])
@pytest.mark.parametrize("name", COUNTS)
def test_negative_numbers_are_not_counted(name, bad):
    model = inference(COUNTS[name])
    where = rf"while running '.*test_out_of_range\.py:\d+\): .*{bad}\b"
    with pytest.raises(poptorch.Error, match=where):
        model(X, torch.tensor([0, bad]))
    expected = COUNTS[name](X, GOOD)
    torch.testing.assert_close(model(X, GOOD), expected, check_dtype=False)


def test_numbers_behind_the_last_bin_are_not_counted():
    model = inference(COUNTS["plain"])
    assert model(X, torch.tensor([7, 8])).tolist() == [0] * 7 + [1]
    assert model(X, torch.tensor([LARGEST, 0])).tolist() == [1] + [0] * 7


@pytest.mark.parametrize("start", [5, -6, 1000, -1000])
def test_slices_wrap_around(start):
    """Slices wrap around, wherever they begin, as PopTorch documents."""
    model = inference(
        lambda x, i: (
            x[i[1] : i[1] + 2],
            poptorch.dynamic_slice(x, 1, i[1], 2, 1),
            poptorch.dynamic_update(x, torch.ones(2, 4), 0, i[1], 2),
        )
    )
    part, columns, updated = model(X, torch.tensor([0, start]))
    rows = [start % 5, (start + 1) % 5]
    assert torch.equal(part, X[rows])
    assert torch.equal(columns, X[:, [start % 4, (start + 1) % 4]])
    expected = X.clone()
    expected[rows] = 1
    assert torch.equal(updated, expected)
