"""Statistics of channels, which the op statistics computes, against NumPy in float64."""

import math

import numpy as np
import pytest
import torch

from popsim_torch.errors import InternalError
from popsim_torch.statistics import (
    Channels,
    Counts,
    Fingerprint,
    Histogram,
    Moments,
    Sample,
    TopK,
    attributes_of,
    decode,
    length_of,
)
from tests.ops.num_threads import threads
from tests.ops.one_op import LAYOUTS, OneOp, dtype_name

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
WHOLE = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FIELDS = ["zeros", "nans", "infs", "mean", "norm", "minimum", "maximum"]
OTHERS = (Moments(), Counts(), Histogram(1), TopK(3), Sample(5), Fingerprint())


def compiled(x, *requests, has_reference=True):
    outputs = [(torch.float64, (length_of(requests, x.shape),))]
    attributes = attributes_of(requests, x.dim())
    return OneOp("statistics", [x], outputs, attributes, has_reference=has_reference)


def channels(x, axis, *others, has_reference=True):
    """Return the statistics of the channels, checked against the formula in PyTorch."""
    requests = (*others, Channels(axis))
    vector = compiled(x, *requests, has_reference=has_reference).run()[0]
    return decode(vector, requests, x.shape).channels


def expected(x, axis):
    """Return the fields of each channel, by NumPy."""
    found = {name: [] for name in FIELDS}
    for values in np.moveaxis(x.to(torch.float64).numpy(), axis, 0):
        finite = values[np.isfinite(values)]
        is_empty = not finite.size
        with np.errstate(over="ignore"):
            found["zeros"].append((values.astype(np.float32) == 0).sum())
        found["nans"].append(np.isnan(values).sum())
        found["infs"].append(np.isinf(values).sum())
        found["mean"].append(math.nan if is_empty else finite.mean())
        found["norm"].append(math.nan if is_empty else math.sqrt(np.square(finite).sum()))
        found["minimum"].append(math.nan if is_empty else finite.min())
        found["maximum"].append(math.nan if is_empty else finite.max())
    return found


def assert_channels(x, axis, *others, has_reference=True):
    found = channels(x, axis, *others, has_reference=has_reference)
    assert found.count == x.numel() // max(x.shape[axis], 1)
    for name, numbers in expected(x, axis).items():
        actual = getattr(found, name)
        assert actual.dtype == (torch.int64 if name in FIELDS[:3] else torch.float64)
        # A mean near zero has the error of its terms.
        slack = 1e-13 if name == "mean" else 0.0
        close = 1e-12 if name in ("mean", "norm") else 0.0
        np.testing.assert_allclose(actual.numpy(), numbers, close, slack, err_msg=name)


def sample(dtype, shape):
    generator = torch.Generator().manual_seed(1)
    if not dtype.is_floating_point:
        low, high = (0, 2) if dtype == torch.bool else (0, 100)
        return torch.randint(low, high, shape, generator=generator).to(dtype)
    x = torch.randn(shape, generator=generator) * 3 + 1
    x[torch.rand(shape, generator=generator) < 0.2] = 0
    return x.to(dtype)


def unusual(dtype, shape):
    """Return numbers of which some are not finite; one channel of the last axis has no others."""
    x = sample(torch.float32, shape)
    for value in (math.nan, math.inf, -math.inf, -0.0, 1e-42, -3e38):
        x[torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.05] = value
        x = x.flip(0)
    x[..., 0] = math.nan
    return x.to(dtype)


SHAPES = [(70, 131), (7, 3), (4, 5, 6), (3, 20, 5, 5), (2, 3, 300, 7), (1, 1), (3, 1, 4), (9,)]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE], ids=dtype_name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_axis(shape, dtype, layout):
    x = layout(sample(dtype, shape))
    for axis in range(-len(shape), len(shape)):
        assert_channels(x, axis)


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_name)
@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_numbers_that_are_not_finite(shape, dtype):
    x = unusual(dtype, shape)
    for axis in range(len(shape)):
        assert_channels(x, axis)


def test_a_channel_without_finite_values_has_no_moments():
    found = channels(torch.tensor([[math.nan, 1.0], [-math.inf, 3.0]]), 1)
    assert found.nans.tolist() == [1, 0] and found.infs.tolist() == [1, 0]
    assert math.isnan(found.mean[0]) and math.isnan(found.norm[0])
    assert math.isnan(found.minimum[0]) and math.isnan(found.maximum[0])
    assert found.mean[1] == 2 and found.maximum[1] == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64], ids=dtype_name)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,), (2, 0, 3)], ids=str)
def test_nothing_is_there(shape, dtype):
    for axis in range(len(shape)):
        found = channels(torch.zeros(shape, dtype=dtype), axis)
        assert found.count == 0 and not found.zeros.any()
        assert found.zeros.shape == found.mean.shape == (shape[axis],)
        assert found.mean.isnan().all() and found.maximum.isnan().all()
        assert len(found.dead) == 0


MANY = {
    "many channels": lambda: (sample(torch.float32, (5, 100_000)), 1),
    "many channels, first": lambda: (sample(torch.float32, (100_000, 5)), 0),
    "many channels of two": lambda: (sample(torch.float16, (100_000, 2)), 0),
    "one channel": lambda: (sample(torch.float32, (300_001, 1)), 1),
    "three channels, last": lambda: (sample(torch.float32, (200_001, 3)), 1),
    "ten channels": lambda: (sample(torch.bfloat16, (70_001, 10)), -1),
    "few values, far away": lambda: (sample(torch.float32, (3, 40, 9, 11)).permute(0, 3, 1, 2), 1),
    "images": lambda: (sample(torch.float32, (4, 33, 30, 31)), 1),
    "images, channels last": lambda: (
        sample(torch.float32, (4, 33, 30, 31)).contiguous(memory_format=torch.channels_last),
        1,
    ),
    "transposed": lambda: (sample(torch.float32, (601, 500)).T, 1),
    "transposed, first": lambda: (sample(torch.float16, (601, 500)).T, 0),
    "part": lambda: (sample(torch.float32, (90, 70)).T[3:60, 5:], 1),
    "repeated": lambda: (sample(torch.float32, (1, 20, 1)).expand(50, 20, 70), 1),
    "repeated channels": lambda: (sample(torch.float32, (50, 1, 70)).expand(50, 20, 70), 1),
    "integers": lambda: (sample(torch.int64, (1000, 300)) + 10**9, 1),
}


@pytest.mark.parametrize("case", MANY.values(), ids=MANY)
def test_many_values(case):
    x, axis = case()
    assert_channels(x, axis, has_reference=False)


@pytest.mark.parametrize("mean", [1e6, -1e6, 1e30])
def test_numbers_of_a_large_mean(mean):
    x = torch.randn((100_000, 20), generator=torch.Generator().manual_seed(2)) + mean
    assert_channels(x, 1, has_reference=False)


def test_numbers_that_float32_does_not_have():
    x = torch.tensor([[1e300, -1e300], [1e-300, 2.0], [0.0, -0.0]], dtype=torch.float64)
    found = channels(x, 0)
    assert found.infs.tolist() == [0, 0, 0]
    assert found.zeros.tolist() == [0, 1, 2]  # as of Counts, in float32
    assert found.maximum.tolist() == [1e300, 2.0, 0.0]


def test_extremes_are_never_minus_zero():
    found = channels(torch.tensor([[-0.0, 0.0], [-0.0, -0.0]]), 1)
    for number in (*found.minimum.tolist(), *found.maximum.tolist(), *found.mean.tolist()):
        assert math.copysign(1, number) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=dtype_name)
def test_together_with_all_other_statistics(dtype):
    x = sample(dtype, (40, 50))
    assert_channels(x, 1, *OTHERS)
    requests = (*OTHERS, Channels())
    together = compiled(x, *requests).run()[0]
    alone = compiled(x, *OTHERS).run()[0]
    assert torch.equal(together[: len(alone)], alone)
    found = decode(together, requests, x.shape)
    assert found.channels.zeros.sum() == found.zeros


@pytest.mark.parametrize("case", MANY.values(), ids=MANY)
def test_the_number_of_threads_changes_nothing(case):
    x, axis = case()
    results = []
    for count in (1, 2, 3):
        with threads(count):
            op = compiled(x, Channels(axis), has_reference=False)
            results += [op.run()[0], op.run()[0]]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("axis", [2, 7, -2])
def test_an_axis_that_is_not_there(axis):
    attributes = {**attributes_of((), 2), "channels": axis}
    with pytest.raises(InternalError, match=r"channels|has an axis"):
        OneOp("statistics", [torch.ones(3, 4)], [(torch.float64, (3,))], attributes)
