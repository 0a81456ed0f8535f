"""The op fps, against the definition of farthest point sampling in Python."""

import pytest
import torch

from popsim_torch.errors import InternalError
from tests.ops.one_op import LAYOUTS, dtype_name, run_op

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def fps(points, bounds, counts, starts=None):
    (rows,) = run_op(
        "fps", [points, starts], [(torch.int64, (sum(counts),))], bounds=bounds, counts=counts
    )
    return rows


def chosen(points, count, start=0):
    """Return the rows that are taken of one segment, by distances in float32."""
    points = points.float()
    rows, left = [start], torch.full((len(points),), torch.inf)
    for _ in range(count - 1):
        distance = torch.zeros(len(points))
        for column in points.T:  # in this order, as rounding follows from it
            distance = distance + (column - column[rows[-1]]).square()
        left = torch.where(distance < left, distance, left)
        left[rows[-1]] = -1
        rows.append(int((left == left.max()).nonzero()[0]))
    return rows


def expected(points, bounds, counts, starts=None):
    rows = []
    for i, count in enumerate(counts):
        first, end = bounds[i : i + 2]
        start = 0 if starts is None else int(starts[i] * (end - first))
        if count:
            rows += [first + row for row in chosen(points[first:end], count, start)]
    return rows


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("width", [1, 3, 20])
def test_against_python(width, dtype, layout):
    points = normal(120, width).to(dtype)
    bounds, counts = [0, 33, 50, 119], [9, 17, 30]
    rows = fps(layout(points), bounds, counts)
    assert rows.tolist() == expected(points, bounds, counts)


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100])
def test_all_points_of_a_segment_are_taken_once(size):
    points = normal(size + 5, 3)
    rows = fps(points, [3, 3 + size], [size]).tolist()
    assert rows == expected(points, [3, 3 + size], [size])
    assert sorted(rows) == list(range(3, 3 + size))


def test_of_several_the_lowest_row():
    """The corners of a square, and its middle."""
    points = torch.tensor([[0.0, 0], [2, 0], [1, 1], [0, 2], [2, 2]])
    assert fps(points, [0, 5], [5]).tolist() == [0, 4, 1, 3, 2]


def test_equal_points_are_taken_in_their_order():
    points = torch.ones(40, 2)
    points[30] = 7
    assert fps(points, [0, 40], [40]).tolist() == [0, 30, *range(1, 30), *range(31, 40)]


def test_segments_without_points():
    points = normal(6, 2)
    bounds, counts = [0, 0, 3, 3, 3, 6, 6], [0, 2, 0, 0, 3, 0]
    assert fps(points, bounds, counts).tolist() == expected(points, bounds, counts)


def test_none_of_some_segments():
    assert fps(normal(6, 2), [0, 3, 6], [0, 1]).tolist() == [3]


def test_starts():
    points = normal(50, 3)
    bounds, counts = [0, 10, 10, 50], [4, 0, 6]
    starts = torch.tensor([0.35, 0.5, 0.999])
    assert fps(points, bounds, counts, starts).tolist() == expected(points, bounds, counts, starts)


@pytest.mark.parametrize(
    ("start", "row"),
    [(0.0, 0), (0.99999994, 9), (1.0, 9), (7.5, 9), (-0.5, 0), (torch.nan, 0), (torch.inf, 9)],
)
def test_starts_out_of_range_stay_in_the_segment(start, row):
    assert fps(normal(12, 1), [1, 11], [1], torch.tensor([start])).tolist() == [1 + row]


def test_nan_and_infinities():
    """What has no distance counts as infinitely far, and brings nothing else nearer."""
    nan, inf = torch.nan, torch.inf
    points = torch.tensor([[0.0, 0], [1, 0], [nan, 0], [5, 0], [inf, 0], [2, nan]])
    assert fps(points, [0, 6], [6]).tolist() == [0, 2, 4, 5, 3, 1]
    assert fps(points, [2, 6], [4]).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("bounds", "counts", "message"),
    [
        ([0, 6], [1, 1], "two bounds and a number"),
        ([0, 4, 3], [1, 0], "the bounds ascend"),
        ([0, 7], [1], "the bounds ascend"),
        ([0, 3], [4], "each count is at most the number of points"),
    ],
)
def test_segments_that_there_are_not(bounds, counts, message):
    with pytest.raises(InternalError, match=message):
        fps(normal(6, 2), bounds, counts)


def test_operands_that_do_not_belong_together():
    with pytest.raises(InternalError, match="input 0 has 2 axes"):
        fps(normal(6), [0, 6], [1])
    for shape in ((6, 0), (0, 2)):
        with pytest.raises(InternalError, match="the points are not empty"):
            fps(normal(*shape), [0, 0], [0])
    with pytest.raises(InternalError, match="input 1 has shape"):
        fps(normal(6, 2), [0, 6], [1], torch.zeros(2))
