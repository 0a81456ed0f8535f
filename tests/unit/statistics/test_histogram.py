"""Edges, quantiles and pictures of histograms by exponent."""

import math

import pytest
import torch

from popsim_torch.errors import UsageValueError
from popsim_torch.statistics import Histogram, statistics_of


def histogram(x, mantissa_bits=0):
    return statistics_of(torch.as_tensor(x), Histogram(mantissa_bits)).histogram


def normal(count=20_000):
    return torch.randn(count, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("mantissa_bits", [0, 1, 2, 3])
def test_edges_meet_and_ascend(mantissa_bits):
    lower, upper = histogram([1.0], mantissa_bits).edges()
    assert lower.shape == upper.shape == (2 * (255 << mantissa_bits),)
    assert (lower < upper).all()
    assert torch.equal(lower[1:], upper[:-1])
    assert lower[0] == -(2.0**128)
    assert upper[-1] == 2.0**128


@pytest.mark.parametrize("mantissa_bits", [0, 1, 2, 3])
def test_values_lie_between_the_edges_of_their_bin(mantissa_bits):
    for value in (0.0, 1.0, 1.5, -1.0, -2.99, 1e-42, -1e-38, 3.4e38, 0.1):
        found = histogram([value], mantissa_bits)
        (place,) = found.counts().nonzero().reshape(-1).tolist()
        lower, upper = (float(edge[place]) for edge in found.edges())
        exact = float(torch.tensor(value))
        assert (lower <= exact < upper) if exact >= 0 else (lower < exact <= upper)


def test_edges_by_hand():
    found = histogram([1.3, -5.0], 1)
    lower, upper = found.edges()
    places = found.counts().nonzero().reshape(-1)
    assert lower[places].tolist() == [-6.0, 1.0]
    assert upper[places].tolist() == [-4.0, 1.5]


def test_counts_are_of_finite_values():
    x = [math.nan, math.inf, -math.inf, 0.0, -0.0, 7.0]
    found = histogram(x)
    assert found.counts().sum() == 3
    assert found.negative.sum() + found.positive.sum() == 6
    assert found.counts().nonzero().reshape(-1).tolist() == [254, 255, 255 + 127 + 2]


@pytest.mark.parametrize("mantissa_bits", [0, 3])
@pytest.mark.parametrize("q", [0.0, 0.01, 0.25, 0.5, 0.75, 0.99, 1.0])
def test_quantiles(q, mantissa_bits):
    x = normal() + 1
    exact = float(torch.quantile(x.double(), q))
    width = abs(exact) / (1 << mantissa_bits)
    assert histogram(x, mantissa_bits).quantile(q) == pytest.approx(exact, abs=width)


def test_quantiles_are_linear_inside_of_a_bin():
    found = histogram([1.0, 1.2, 1.5, 1.9])
    assert [found.quantile(q) for q in (0.0, 0.25, 0.5, 1.0)] == [1.0, 1.25, 1.5, 2.0]


def test_quantiles_leave_out_what_is_not_finite():
    assert histogram([math.inf, 4.0, math.nan, -math.inf]).quantile(1.0) == 8.0
    assert math.isnan(histogram([math.inf]).quantile(0.5))
    with pytest.raises(UsageValueError, match="q is from 0 to 1, got 50"):
        histogram([1.0]).quantile(50)


@pytest.mark.parametrize("mantissa_bits", [0, 2])
@pytest.mark.parametrize("n", [1, 2, 7, 30, 64, 10_000])
def test_wider_bins(n, mantissa_bits):
    x = normal()
    edges, counts = histogram(x, mantissa_bits).rebinned(n)
    assert len(edges) == len(counts) + 1
    assert 1 <= len(counts) <= n
    assert (edges[1:] > edges[:-1]).all()
    assert edges[0] <= x.min() <= x.max() <= edges[-1]
    exact = [
        int(((x >= low) & (x < high)).sum())
        for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    ]
    assert counts.tolist() == exact


def test_empty_neighbours_become_one_bin():
    edges, counts = histogram([-1.5, 1.25, 300.0]).rebinned(100)
    assert counts.tolist() == [1, 0, 1, 0, 1]
    assert edges.tolist() == [-2.0, -1.0, 1.0, 2.0, 256.0, 512.0]


def test_bins_next_to_zero_are_joined_first():
    edges, counts = histogram([-1.5, -0.6, 0.1, 0.7, 1.1, 2.5]).rebinned(4)
    assert counts.tolist() == [1, 3, 1, 1]
    assert edges.tolist() == [-2.0, -1.0, 1.0, 2.0, 4.0]


def test_no_values_have_no_bins():
    edges, counts = histogram([math.inf]).rebinned(9)
    assert edges.shape == counts.shape == (0,)
    with pytest.raises(UsageValueError, match="n is at least 1, got 0"):
        histogram([1.0]).rebinned(0)
