"""The op nearest, against distances in float64."""

import pytest
import torch

from popsim_torch.errors import Error, InternalError
from tests.ops.one_op import LAYOUTS, dtype_name, run_op

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def nearest(x, y, *batches):
    (rows,) = run_op("nearest", [x, y, *batches], [(torch.int64, (x.shape[0],))])
    return rows


def distances(x, y):
    """Return the distances of all pairs, in float64."""
    return (x.double()[:, None] - y.double()[None]).square().sum(2)


def normal(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("width", [1, 3, 40])
def test_against_float64(width, dtype, layout):
    x, y = normal(150, width).to(dtype), normal(301, width, seed=2).to(dtype)
    rows = nearest(layout(x), layout(y))
    exact = distances(x, y)
    found = exact.gather(1, rows[:, None]).squeeze(1)
    torch.testing.assert_close(found, exact.amin(1), rtol=1e-6, atol=0)
    if dtype == torch.float32:
        assert torch.equal(rows, exact.argmin(1))


@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 127, 128, 129, 500])
@pytest.mark.parametrize("num_candidates", [1, 3, 4, 5, 1366, 3000])
def test_sizes(num_rows, num_candidates):
    """Rows and candidates end within a vector, a block and a chunk."""
    x, y = normal(num_rows, 3), normal(num_candidates, 3, seed=2)
    assert torch.equal(nearest(x, y), distances(x, y).argmin(1))


def test_of_several_the_lowest_row():
    y = torch.tensor([[5.0], [1.0], [3.0], [1.0], [3.0], [1.0]]).repeat(700, 1)
    assert nearest(torch.tensor([[0.0], [2.0], [4.0], [1.0]]), y).tolist() == [1, 1, 0, 1]


def test_nan_and_infinities():
    nan, inf = torch.nan, torch.inf
    y = torch.tensor([[nan, 0.0], [inf, 0.0], [3.0, 0.0], [-inf, 0.0], [1.0, 0.0]])
    x = torch.tensor([[0.0, 0.0], [nan, 0.0], [inf, 0.0], [2.5, 0.0], [0.0, inf]])
    assert nearest(x, y).tolist() == [4, 0, 0, 2, 0]


def test_distances_that_overflow_are_as_far_as_the_first():
    assert nearest(torch.tensor([[3e38]]), torch.tensor([[-3e38], [-1e38]])).tolist() == [0]


def test_small_distances_far_from_zero():
    """No difference of large squares: they would have no digits left."""
    x = 4096 + torch.arange(64).reshape(-1, 1) / 1024
    assert torch.equal(nearest(x, x.flip(0)), torch.arange(63, -1, -1))


def test_no_rows():
    assert nearest(torch.ones(0, 3), torch.ones(2, 3)).shape == (0,)


# Batches

BATCH_X = [0] * 40 + [2] * 3 + [3] * 200 + [9] * 20
BATCH_Y = [-1] * 5 + [0] * 7 + [1] * 10 + [2] * 1 + [3] * 100 + [9] * 33


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtypes", [(torch.int32, torch.int64), (torch.int64, torch.int32)])
def test_rows_of_the_same_batch(dtypes, layout):
    batches = [torch.tensor(b) for b in (BATCH_X, BATCH_Y)]
    x, y = normal(len(BATCH_X), 3), normal(len(BATCH_Y), 3, seed=2)
    others = batches[0][:, None] != batches[1][None]
    expected = distances(x, y).masked_fill(others, torch.inf).argmin(1)
    given = (layout(b.to(dtype)) for b, dtype in zip(batches, dtypes, strict=True))
    assert torch.equal(nearest(x, y, *given), expected)


def test_nan_in_a_batch_gives_its_first_row():
    x, y = torch.full((4, 1), torch.nan), torch.zeros(5, 1)
    of_x, of_y = torch.tensor([0, 1, 1, 2]), torch.tensor([0, 0, 1, 1, 2])
    assert nearest(x, y, of_x, of_y).tolist() == [0, 2, 2, 4]


@pytest.mark.parametrize(
    ("batch_x", "batch_y", "message"),
    [
        ([0, 2, 1], [0, 1, 2], "batch_x must ascend, but 1 follows 2 in row 2"),
        ([0, 1, 2], [1, 0, 2], "batch_y must ascend, but 0 follows 1 in row 1"),
        ([0, 1, 1], [0, 0, 2], "row 1 of x has the batch number 1, which no row of y has"),
        ([0, 1, 3], [0, 1, 2], "row 2 of x has the batch number 3, which no row of y has"),
        ([-5, 1, 1], [0, 1, 1], "row 0 of x has the batch number -5, which no row of y has"),
    ],
)
def test_batches_that_cannot_be(batch_x, batch_y, message):
    with pytest.raises(Error, match=message):
        nearest(normal(3, 2), normal(3, 2), torch.tensor(batch_x), torch.tensor(batch_y))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([normal(3), normal(3, 1)], "input 0 has 2 axes"),
        ([normal(3, 1), normal(3)], "input 1 has 2 axes"),
        ([normal(3, 2), normal(3, 3)], "x and y have the same number of columns"),
        ([normal(3, 2), normal(0, 2)], "the candidates are not empty"),
        ([normal(3, 0), normal(4, 0)], "the candidates are not empty"),
        ([normal(3, 2), normal(4, 2), torch.arange(3)], "or neither has"),
        ([normal(3, 2), normal(4, 2), torch.arange(3), torch.arange(3)], "input 3 has shape"),
        ([normal(3, 2), normal(4, 2), torch.arange(2), torch.arange(4)], "input 2 has shape"),
    ],
)
def test_operands_that_do_not_belong_together(inputs, message):
    with pytest.raises(InternalError, match=message):
        nearest(*inputs)
