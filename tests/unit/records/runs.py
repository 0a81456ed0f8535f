"""Statistics of small tensors, and runs that are made of them."""

import hashlib
import math

import torch

from popsim_torch.observe.record import Record
from popsim_torch.observe.statistics import (
    Counts,
    Fingerprint,
    Histogram,
    HistogramCounts,
    Moments,
    Sample,
    Statistics,
    TopK,
)
from popsim_torch.records import RecordedTensor, RunWriter

ALL = (Moments(), Counts(), Histogram(1), TopK(3), Sample(4), Fingerprint())
USUAL = (Moments(), Sample(16), Fingerprint())


def statistics(tensor, *requests):
    """Return statistics of a tensor. Another fingerprint than the package's serves as well here."""
    flat = tensor.detach().reshape(-1)
    wide = flat.to(torch.float64)
    finite = wide[wide.isfinite()]
    found = {}
    for one in requests:
        if isinstance(one, Moments):
            found |= moments(finite)
        elif isinstance(one, Counts):
            found |= {"zeros": int((wide == 0).sum()), "subnormals": 0}
            found |= {"half_overflows": 0, "half_underflows": 0}
        elif isinstance(one, Histogram):
            found["histogram"] = histogram(flat, one.mantissa_bits)
        elif isinstance(one, TopK):
            order = wide.abs().argsort(descending=True, stable=True)[: one.k]
            found |= {"top_values": wide[order], "top_positions": order}
        elif isinstance(one, Sample):
            number = min(one.n, len(wide))
            found["samples"] = wide[[i * len(wide) // number for i in range(number)]]
        elif isinstance(one, Fingerprint):
            digest = hashlib.blake2b(flat.to(torch.float32).numpy().tobytes(), digest_size=8)
            found["fingerprint"] = int.from_bytes(digest.digest(), "little")
    return Statistics(len(wide), int(wide.isnan().sum()), int(wide.isinf().sum()), **found)


def moments(finite):
    if not len(finite):
        names = ("mean", "std", "minimum", "maximum", "norm", "absolute_mean")
        return dict.fromkeys(names, math.nan)
    return {
        "mean": finite.mean().item(),
        "std": finite.std(correction=0).item(),
        "minimum": finite.min().item(),
        "maximum": finite.max().item(),
        "norm": finite.norm().item(),
        "absolute_mean": finite.abs().mean().item(),
    }


def histogram(flat, mantissa_bits):
    bits = flat.to(torch.float32).view(torch.int32)
    bins = (bits & 0x7FFFFFFF) >> (23 - mantissa_bits)
    size = 256 << mantissa_bits
    return HistogramCounts(
        mantissa_bits,
        torch.bincount(bins[bits < 0].long(), minlength=size),
        torch.bincount(bins[bits >= 0].long(), minlength=size),
    )


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
        yield Record(name, step, micro_batch, 0, statistics(tensor, *requests))


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
        elif isinstance(value, float) and math.isnan(value):
            assert math.isnan(same), name
        else:
            assert value == same, name
