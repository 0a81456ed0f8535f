"""Statistics as the vector that the op ``statistics`` gives: what is asked for, and what came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from popsim_torch.errors import InternalError, UsageTypeError, UsageValueError
from popsim_torch.reference.statistics import statistics_vector
from popsim_torch.statistics.histogram import HistogramCounts
from popsim_torch.statistics.requests import (
    Counts,
    Fingerprint,
    Histogram,
    Moments,
    Request,
    Sample,
    TopK,
)
from popsim_torch.statistics.results import Statistics

__all__ = ["attributes_of", "decode", "length_of", "statistics_of"]

_KINDS = (Moments, Counts, Histogram, TopK, Sample, Fingerprint)
_MOMENTS = ("mean", "std", "minimum", "maximum", "norm", "absolute_mean")
_COUNTS = ("zeros", "subnormals", "half_overflows", "half_underflows")
_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


def attributes_of(requests: Sequence[Request]) -> dict[str, bool | int]:
    """Return the attributes of the op ``statistics`` for some requests, in any order.

    Raises:
        UsageTypeError: A request is an object of another kind, or a class.
        UsageValueError: Two requests of one kind differ.
    """
    found: dict[type, Any] = {}
    for request in requests:
        if type(request) not in _KINDS:
            shown = f"the class {request.__name__}" if isinstance(request, type) else repr(request)
            kinds = ", ".join(f"{kind.__name__}()" for kind in _KINDS)
            raise UsageTypeError(f"Statistics: {shown} asks for nothing; pass any of {kinds}.")
        before = found.setdefault(type(request), request)
        if before != request:
            raise UsageValueError(
                f"Statistics: {before} and {request} are asked for of one tensor, which has one "
                "of this kind; pass one of them."
            )
    return {
        "moments": Moments in found,
        "counts": Counts in found,
        "histogram": found[Histogram].mantissa_bits if Histogram in found else -1,
        "top": found[TopK].k if TopK in found else 0,
        "samples": found[Sample].n if Sample in found else 0,
        "fingerprint": Fingerprint in found,
    }


def length_of(requests: Sequence[Request], numel: int) -> int:
    """Return the length of the vector for a tensor of ``numel`` values."""
    asked = attributes_of(requests)
    length = 3 + len(_MOMENTS) * asked["moments"] + len(_COUNTS) * asked["counts"]
    length += 2 * asked["fingerprint"] + 2 * min(asked["top"], numel)
    length += min(asked["samples"], numel)
    return length + (512 << asked["histogram"] if asked["histogram"] >= 0 else 0)


class _Reader:
    """Takes the parts of a vector, from its beginning to its end."""

    def __init__(self, vector: torch.Tensor) -> None:
        self._vector = vector
        self._place = 0

    def take(self, count: int) -> torch.Tensor:
        """Return the next numbers, in memory of their own."""
        self._place += count
        return self._vector[self._place - count : self._place].clone()

    def whole(self, count: int) -> list[int]:
        """Return the next numbers as integers."""
        return [int(number) for number in self.take(count).tolist()]


def decode(vector: torch.Tensor, requests: Sequence[Request]) -> Statistics:
    """Return the statistics that a vector of the op ``statistics`` holds.

    Args:
        vector: float64, shape ``(length_of(requests, numel),)``, on the CPU.
        requests: What the op was asked for, in any order.

    Raises:
        InternalError: The vector has another shape or dtype.
    """
    asked = attributes_of(requests)
    numel = int(vector[0]) if vector.dim() == 1 and len(vector) else -1
    shape = (length_of(requests, numel),) if numel >= 0 else None
    if vector.dtype != torch.float64 or tuple(vector.shape) != shape:
        raise InternalError(
            f"decode: the statistics of {max(numel, 0)} values are "
            f"{length_of(requests, max(numel, 0))} numbers in float64, got {vector.dtype} of shape "
            f"{list(vector.shape)}"
        )
    reader = _Reader(vector)
    count, nans, infs = reader.whole(3)
    fields: dict[str, Any] = {}
    if asked["moments"]:
        values = reader.take(len(_MOMENTS)).tolist()
        is_empty = count == nans + infs
        fields.update(
            (name, math.nan if is_empty else v) for name, v in zip(_MOMENTS, values, strict=True)
        )
    if asked["counts"]:
        fields.update(zip(_COUNTS, reader.whole(len(_COUNTS)), strict=True))
    if asked["fingerprint"]:
        lower, upper = reader.whole(2)
        fields["fingerprint"] = upper << 32 | lower
    if asked["top"]:
        most = min(asked["top"], count)
        top, positions = reader.take(most), reader.take(most).to(torch.int64)
        is_there = positions >= 0
        fields.update(top_values=top[is_there], top_positions=positions[is_there])
    if asked["samples"]:
        fields["samples"] = reader.take(min(asked["samples"], count))
    bits = asked["histogram"]
    if bits >= 0:
        signs = (reader.take(256 << bits).to(torch.int64) for _ in range(2))
        fields["histogram"] = HistogramCounts(bits, *signs)
    return Statistics(count, nans, infs, **fields)


def statistics_of(tensor: torch.Tensor, *requests: Request) -> Statistics:
    """Return statistics of a tensor, computed on the host with PyTorch.

    Counts, the histogram, the largest values, samples and the fingerprint equal those that the
    device computes of the same values; moments agree to 12 digits. Numbers of 64 bits, and integers
    of 32, are rounded to float32 for the histogram and the counts, and float64 for the fingerprint,
    too.

    Args:
        tensor: Any shape and strides, any dtype that a device may hold or convert, on any device.
        *requests: What to compute besides the numbers of values, NaN and infinities.

    Raises:
        UsageTypeError: The tensor is no tensor, or has another dtype; or a request is none.
        UsageValueError: Two requests of one kind differ.
    """
    asked = attributes_of(requests)
    if not isinstance(tensor, torch.Tensor):
        raise UsageTypeError(
            f"statistics_of: got {type(tensor).__name__}, not a tensor; torch.as_tensor makes one."
        )
    if tensor.dtype not in _DTYPES:
        raise UsageTypeError(
            f"statistics_of: there are no statistics of {tensor.dtype} values; convert them to "
            "float32, or pass the real and the imaginary part of complex numbers."
        )
    vector = statistics_vector(tensor.detach().to("cpu"), **asked)  # type: ignore[arg-type]
    return decode(vector, requests)
