"""Statistics of parts together are those of all values."""

import dataclasses
import math

import pytest
import torch

from popsim_torch.errors import UsageValueError
from popsim_torch.statistics import (
    Channels,
    Counts,
    Fingerprint,
    Histogram,
    Moments,
    Sample,
    TopK,
    merge,
    statistics_of,
)

ASKED = (Moments(), Counts(), Histogram(2))
MOMENTS = ["mean", "std", "minimum", "maximum", "norm", "absolute_mean"]


def parts_of(x, *bounds):
    return [x[first:last] for first, last in zip((0, *bounds), (*bounds, len(x)), strict=True)]


@pytest.mark.parametrize("bounds", [(500,), (1, 2, 3, 900), (0, 400, 400)], ids=str)
@pytest.mark.parametrize("mean", [0.0, 1e6])
def test_all_values_together(bounds, mean):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1)) + mean
    x[7], x[8], x[450] = math.nan, math.inf, 0.0
    merged = merge([statistics_of(part, *ASKED) for part in parts_of(x, *bounds)])
    whole = statistics_of(x, *ASKED)
    for field in dataclasses.fields(whole):
        one, other = getattr(merged, field.name), getattr(whole, field.name)
        if field.name in MOMENTS:
            assert one == pytest.approx(other, rel=1e-12), field.name
        elif field.name == "histogram":
            assert torch.equal(one.counts(), other.counts())
            assert torch.equal(one.negative, other.negative)
        else:
            assert one == other, field.name


def test_parts_without_finite_values_have_no_moments():
    none = statistics_of(torch.tensor([math.nan, math.inf]), Moments())
    some = statistics_of(torch.tensor([1.0, 3.0]), Moments())
    assert merge([none, some]).mean == merge([some, none]).mean == 2.0
    assert math.isnan(merge([none, none]).std)
    assert merge([none, some, none]).nans == 2


def test_what_belongs_to_one_tensor_is_left_out():
    x = torch.arange(4.0)
    one = statistics_of(x, TopK(2), Sample(2), Fingerprint(), Moments())
    both = merge([one, one])
    left_out = (both.top_values, both.top_positions, both.samples, both.fingerprint)
    assert left_out == (None,) * 4
    assert both.count == 8
    assert merge([one]) is one


def test_what_a_part_does_not_have_is_left_out():
    x = torch.arange(4.0)
    both = merge([statistics_of(x, Moments(), Counts()), statistics_of(x, Moments())])
    assert (both.zeros, both.mean, both.histogram) == (None, 1.5, None)
    assert merge([statistics_of(x, Channels(0)), statistics_of(x)]).channels is None


@pytest.mark.parametrize("bounds", [(50,), (1, 2, 3, 90), (0, 40, 40)], ids=str)
@pytest.mark.parametrize("mean", [0.0, 1e6])
def test_channels_of_all_values_together(bounds, mean):
    x = torch.randn(100, 6, generator=torch.Generator().manual_seed(1)) + mean
    x[3, 0] = x[60, 0] = 0.0
    x[7, 1], x[8, 1] = math.nan, -math.inf
    x[:45, 2], x[45:, 3], x[:, 4], x[:, 5] = math.nan, math.inf, math.nan, 0.0
    merged = merge([statistics_of(part, Channels()) for part in parts_of(x, *bounds)]).channels
    whole = statistics_of(x, Channels()).channels
    assert merged.dead.tolist() == [5] and merged.count == whole.count == 100
    for name, numbers in vars(whole).items():
        torch.testing.assert_close(
            getattr(merged, name), numbers, rtol=1e-12, atol=1e-14, equal_nan=True
        )


def test_parts_that_do_not_fit_together_are_refused():
    x = torch.arange(4.0)
    with pytest.raises(UsageValueError, match="of 0 and of 2 mantissa bits"):
        merge([statistics_of(x, Histogram(bits)) for bits in (0, 2)])
    with pytest.raises(UsageValueError, match="4 channels and 2 channels do not correspond"):
        merge([statistics_of(one, Channels(0)) for one in (x, x[:2])])
    with pytest.raises(UsageValueError, match="there are no statistics"):
        merge([])
