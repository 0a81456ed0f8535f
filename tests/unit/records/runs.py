"""Runs of a few small tensors."""

import math

import torch

from popsim_torch.observe.record import Record
from popsim_torch.records import RecordedTensor, RunWriter
from popsim_torch.statistics import (
    Channels,
    ChannelStatistics,
    Counts,
    Fingerprint,
    Histogram,
    HistogramCounts,
    Moments,
    Sample,
    TopK,
    statistics_of,
)

ALL = (Moments(), Counts(), Histogram(1), TopK(3), Sample(4), Fingerprint(), Channels(-1))
USUAL = (Moments(), Sample(16), Fingerprint())


TENSORS = ("input", "fc1/Gemm:0", "Gradient___fc1.weight", "UpdatedVar___fc1.weight")


def values(step, name):
    """Return the values of a tensor of the usual run."""
    generator = torch.Generator().manual_seed(31 * step + TENSORS.index(name))
    return torch.randn(6, 4, generator=generator)


def described(dtype=torch.float32):
    return [
        RecordedTensor(name, (6, 4), dtype, "fc1" if "fc1" in name else "", "", "net.py:7")
        for name in TENSORS
    ]


def records_of_step(step, change=lambda step, name, tensor: tensor, requests=USUAL):
    for name in TENSORS:
        micro_batch = None if name.startswith("Updated") else 0
        tensor = change(step, name, values(step, name))
        yield Record(name, step, micro_batch, 0, statistics_of(tensor, *requests))


def write_run(path, change=lambda step, name, tensor: tensor, *, steps=4, requests=USUAL, **more):
    """Write a run of some steps, whose values may be changed."""
    tensors = more.pop("tensors", described())
    with RunWriter(path, tensors=tensors, **more) as writer:
        for step in range(steps):
            writer.write_records(list(records_of_step(step, change, requests)))
    return path


def assert_same(one, other):
    """Compare two statistics, including their tensors, with equal NaN."""
    assert {*vars(one)} == {*vars(other)}
    for name, value in vars(one).items():
        same = vars(other)[name]
        if isinstance(value, torch.Tensor):
            assert value.dtype == same.dtype, name
            torch.testing.assert_close(value, same, rtol=0, atol=0, equal_nan=True)
        elif isinstance(value, HistogramCounts):
            assert value.mantissa_bits == same.mantissa_bits
            assert torch.equal(value.negative, same.negative)
            assert torch.equal(value.positive, same.positive)
        elif isinstance(value, ChannelStatistics):
            assert_same(value, same)
        elif isinstance(value, float) and math.isnan(value):
            assert math.isnan(same), name
        else:
            assert value == same, name
