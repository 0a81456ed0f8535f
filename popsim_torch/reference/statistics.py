"""The statistics of a tensor, as the vector that the device computes."""

from __future__ import annotations

import torch
from torch import Tensor

from popsim_torch.reference.call import Call, op

__all__ = ["statistics_vector"]

_HALF_OVERFLOW = 0x477FF000  # 65520: rounds to infinity in float16
_HALF_UNDERFLOW = 0x33000000  # 2**-25: rounds to 0
_INFINITY = 0x7F800000
_LOWER_BITS = (1 << 32) - 1
_NUM_KEYS = 256
_UPPER_POSITIONS = 1 << 40
_PIECE = 1 << 18  # values whose keys are made at a time


def statistics_vector(
    x: Tensor,
    *,
    moments: bool = False,
    counts: bool = False,
    histogram: int = -1,
    top: int = 0,
    samples: int = 0,
    fingerprint: bool = False,
    channels: int = -1,
) -> Tensor:
    """Return the result of the op ``statistics``.

    Args:
        x: Any shape, any dtype of the device, on the CPU.
        moments: Whether to compute mean, standard deviation, minimum, maximum, norm and mean
            magnitude of the finite values.
        counts: Whether to count zeros, subnormals, and overflows and underflows of float16.
        histogram: The number of mantissa bits of the histogram's bins; -1 for no histogram.
        top: How many of the largest magnitudes to find.
        samples: How many samples to take.
        fingerprint: Whether to compute the fingerprint.
        channels: The axis of the channels; -1 for no statistics of channels.

    Returns:
        float64, one axis. Its parts are in the order of ``csrc/ops/observe/requests.h``.
    """
    flat = x.detach().reshape(-1)
    values = flat.to(torch.float64)
    floats = values.to(torch.float32)
    parts = [torch.stack([torch.tensor(len(flat)), values.isnan().sum(), values.isinf().sum()])]
    if moments:
        parts.append(_moments(values[values.isfinite()]))
    if counts:
        parts.append(_counts(floats, values, x.dtype))
    if fingerprint:
        parts.append(_halves(_fingerprint(flat, floats)))
    parts += _top(values, min(top, len(flat)))
    num_samples = min(samples, len(flat))
    if num_samples:
        parts.append(values[torch.arange(num_samples) * len(flat) // num_samples])
    if histogram >= 0:
        bins = torch.bincount(_bits(floats) >> (23 - histogram), minlength=512 << histogram)
        parts.append(bins.roll(256 << histogram))  # negative ones first
    if channels >= 0:
        parts.append(_channels(x, channels).reshape(-1))
    return torch.cat([part.to(torch.float64) for part in parts])


def _bits(floats: Tensor) -> Tensor:
    """Return the bits of float32 numbers, from 0 to 2**32 - 1, in int64."""
    return floats.contiguous().view(torch.int32).to(torch.int64) & _LOWER_BITS


def _moments(x: Tensor) -> Tensor:
    if not len(x):
        return torch.zeros(6)
    mean = x.mean()
    mean = mean + (x - mean).mean()
    low, high = (bound + 0.0 for bound in torch.aminmax(x))  # 0 instead of -0
    std = (x - mean).square().mean().sqrt()
    return torch.stack([mean, std, low, high, x.square().sum().sqrt(), x.abs().mean()])


def _counts(floats: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    sizes = _bits(floats) & 0x7FFFFFFF
    smallest_normal = 0x38800000 if dtype == torch.float16 else 0x00800000
    is_not_zero = sizes != 0
    return torch.stack(
        [
            (~is_not_zero).sum(),
            (is_not_zero & (sizes < smallest_normal)).sum(),
            (values.isfinite() & (sizes >= _HALF_OVERFLOW)).sum(),
            (is_not_zero & (sizes <= _HALF_UNDERFLOW)).sum(),
        ]
    )


def _channels(x: Tensor, axis: int) -> Tensor:
    """Return the results of each channel, in columns."""
    num_values = x.numel() // max(x.shape[axis], 1)
    rows = x.detach().movedim(axis, 0).reshape(x.shape[axis], num_values).to(torch.float64)
    is_finite = rows.isfinite()
    finite = rows.where(is_finite, 0.0)
    num_finite = is_finite.sum(1)
    results = [
        (rows.to(torch.float32) == 0).sum(1),
        rows.isnan().sum(1),
        rows.isinf().sum(1),
        finite.sum(1) / num_finite.clamp(min=1),
        finite.square().sum(1).sqrt(),
    ]
    for sign in (-1.0, 1.0):
        # There is no extreme of an empty row.
        least = torch.full((len(rows), 1), -torch.inf, dtype=torch.float64)
        largest = torch.cat([(rows * sign).where(is_finite, -torch.inf), least], 1).amax(1)
        results.append((largest * sign + 0.0).where(num_finite > 0, 0.0))  # 0 instead of -0
    return torch.stack([one.to(torch.float64) for one in results])


def _top(values: Tensor, count: int) -> list[Tensor]:
    """Return the largest magnitudes and their positions; position -1 where there are no more."""
    if not count:
        return []
    magnitudes = values.abs().nan_to_num(nan=-1.0, posinf=torch.inf)
    least = magnitudes.topk(count).values[-1].clamp(min=0.0)
    places = (magnitudes >= least).nonzero().reshape(-1)
    order = magnitudes[places].sort(descending=True, stable=True).indices
    found = places[order][:count]
    top = torch.zeros(count, dtype=torch.float64)
    positions = torch.full((count,), -1)
    top[: len(found)] = values[found]
    positions[: len(found)] = found
    return [top, positions]


def _halves(number: int) -> Tensor:
    return torch.tensor([number & _LOWER_BITS, number >> 32 & _LOWER_BITS])


def _fingerprint(flat: Tensor, floats: Tensor) -> int:
    """Return the sum of the products of bits and keys, modulo 2**64 (fingerprint.h)."""
    if flat.is_floating_point():
        return _sum_of_products(_bits(floats), 0)
    whole = flat.to(torch.int64)
    total = _sum_of_products(whole & _LOWER_BITS, 0)
    if flat.dtype == torch.int64:
        extended = whole.to(torch.int32).to(torch.int64)
        upper = (whole ^ extended) >> 32 & _LOWER_BITS
        total += _sum_of_products(upper, _UPPER_POSITIONS)
    return total


def _sum_of_products(bits: Tensor, first: int) -> int:
    total = 0
    for start in range(0, len(bits), _PIECE):
        piece = bits[start : start + _PIECE]
        total += int((piece * _keys(first + start, len(piece))).sum())
    return total


def _keys(first: int, count: int) -> Tensor:
    """Return the keys of positions; the first one is a multiple of the number of keys."""
    place = _mix(torch.arange(_NUM_KEYS)) | 1
    rows = torch.arange(-(-count // _NUM_KEYS)) + (first // _NUM_KEYS + (1 << 32))
    return (place ^ (_mix(rows) & ~1)[:, None]).reshape(-1)[:count]


def _mix(x: Tensor) -> Tensor:
    """Return the mixed numbers of splitmix64, in int64."""
    z = (x + 1) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in _MIXING:
        z = (z ^ _shifted(z, shift)) * _signed(factor)
    return z ^ _shifted(z, 31)


_MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def _shifted(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


@op
def statistics(call: Call, x: Tensor) -> Tensor:
    """Return counts, moments, a histogram, the largest values, and what else was asked for."""
    (stored,) = call.stored
    assert stored is not None
    return statistics_vector(stored, **call.attributes)
