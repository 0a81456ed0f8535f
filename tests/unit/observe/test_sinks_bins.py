"""Bins of histograms, fewer and the same for all steps."""

import numpy as np
import pytest

from popsim_torch.observe.sinks.bins import BINADES, bands, binades, edges_and_counts
from tests.unit.observe.made_records import statistics


def bins(values, mantissa_bits=0, most=64):
    return edges_and_counts(statistics(values, mantissa_bits).histogram, most)


@pytest.mark.parametrize("mantissa_bits", [0, 1, 2, 3])
@pytest.mark.parametrize("most", [8, 16, 64])
def test_every_finite_value_is_in_its_bin(mantissa_bits, most):
    random = np.random.default_rng(0)
    values = (random.normal(0, 1, 2000) * 10.0 ** random.integers(-30, 30, 2000)).astype("float32")
    edges, counts = bins(values, mantissa_bits, most)
    assert 1 <= len(counts) <= most and (np.diff(edges) > 0).all()
    # A bin of positive numbers has its lower edge, one of negative numbers its upper edge.
    positive, negative = values[values > 0], values[values < 0]
    wanted = np.histogram(positive, edges)[0] + np.histogram(-negative, -edges[::-1])[0][::-1]
    assert counts.tolist() == wanted.tolist() and counts.sum() == 2000


def test_few_exponents_keep_fine_bins():
    edges, counts = bins([1.0, 1.25, 1.5, 1.75], mantissa_bits=2)
    assert edges.tolist() == [1.0, 1.25, 1.5, 1.75, 2.0] and counts.tolist() == [1, 1, 1, 1]


def test_neighbours_without_values_are_one_bin():
    edges, counts = bins([-1.5, 1e-20, 1024.0])
    assert counts.tolist() == [1, 0, 1, 0, 1]
    assert edges[0] == -2 and edges[1] == -1 and edges[-1] == 2048 and edges[-2] == 1024


def test_the_largest_number_and_zeros_have_bins():
    largest = float(np.finfo("float32").max)
    edges, counts = bins([largest, 0.0, 0.0, -0.0])
    assert counts.sum() == 4 and edges[-1] == largest and np.isfinite(edges).all()
    assert counts[np.searchsorted(edges, 0.0, "right") - 1] == 2


@pytest.mark.parametrize("values", [[], [np.nan, np.inf, -np.inf]])
def test_without_finite_values_there_are_no_bins(values):
    edges, counts = bins(values)
    assert len(edges) == len(counts) == 0
    assert binades(statistics(values).histogram).sum() == 0


@pytest.mark.parametrize("mantissa_bits", [0, 3])
def test_counts_by_sign_and_exponent(mantissa_bits):
    values = [-3.0, -2.0, 0.0, -0.0, 1e-45, 1.0, 1.9, np.inf, np.nan]
    counts = binades(statistics(values, mantissa_bits).histogram)
    middle = BINADES // 2
    assert len(counts) == BINADES and counts.sum() == 7
    assert (counts[middle], counts[middle + 127], counts[middle - 128]) == (3, 2, 2)


def both(*rows, most=64):
    return bands([binades(statistics(row).histogram) for row in rows], most)


def test_bins_of_several_steps_are_the_same():
    found = both([-1.5, 0.0, 0.75], [3.0, 0.0, 0.0])
    assert found.edges.tolist() == [-4, -2, -1, -0.5, 0.5, 1, 2, 4]
    assert found.counts.tolist() == [[0, 1, 0, 1, 1, 0, 0], [0, 0, 0, 2, 0, 0, 1]]


def test_a_sign_that_no_value_has_needs_no_bins():
    found = both([1.0, 2.0])
    assert found.edges.tolist() == [-1, 1, 2, 4] and found.counts.tolist() == [[0, 1, 1]]
    found = both([-1.0, 0.0])
    assert found.edges.tolist() == [-2, -1, 1] and found.counts.tolist() == [[1, 1]]


def test_only_zeros_are_one_bin():
    found = both([0.0, 0.0], [0.0])
    assert found.counts.tolist() == [[2], [1]] and found.edges[0] < 0 < found.edges[1]


@pytest.mark.parametrize("most", [3, 10, 64])
def test_many_exponents_are_joined(most):
    values = 2.0 ** np.arange(-60, 60)
    found = both(np.concatenate([values, -values]), most=most)
    assert found.counts.shape[1] <= most and found.counts.sum() == 240
    assert len(found.edges) == found.counts.shape[1] + 1 and (np.diff(found.edges) > 0).all()
