"""Statistics as the vector that the op ``statistics`` gives: what is asked for, and what came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from popsim_torch.errors import InternalError, UsageTypeError, UsageValueError
from popsim_torch.reference.statistics import statistics_vector
from popsim_torch.statistics.channels import ChannelStatistics
from popsim_torch.statistics.histogram import HistogramCounts
from popsim_torch.statistics.requests import (
    Channels,
    Counts,
    Fingerprint,
    Histogram,
    Moments,
    Request,
    Sample,
    TopK,
    fitting,
)
from popsim_torch.statistics.results import Statistics

__all__ = [
    "Decoder",
    "attributes_of",
    "check_requests",
    "decode",
    "length_of",
    "statistics_of",
]

_KINDS = (Moments, Counts, Histogram, TopK, Sample, Fingerprint, Channels)
_MOMENTS = ("mean", "std", "minimum", "maximum", "norm", "absolute_mean")
_NO_MOMENTS = (math.nan,) * len(_MOMENTS)
_COUNTS = ("zeros", "subnormals", "half_overflows", "half_underflows")
_CHANNEL_COUNTS = ("zeros", "nans", "infs")
_CHANNEL_MOMENTS = ("mean", "norm", "minimum", "maximum")
_NUM_OF_CHANNEL = len(_CHANNEL_COUNTS) + len(_CHANNEL_MOMENTS)
_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


def check_requests(requests: Sequence[Request]) -> dict[type, Any]:
    """Return the request of each kind.

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
    return found


def attributes_of(requests: Sequence[Request], num_axes: int) -> dict[str, bool | int]:
    """Return the attributes of the op ``statistics`` for some requests, in any order.

    Args:
        requests: The requests.
        num_axes: The number of axes of the tensor.

    Raises:
        UsageTypeError: A request is an object of another kind, or a class.
        UsageValueError: Two requests of one kind differ.
    """
    found = check_requests(requests)
    return {
        "moments": Moments in found,
        "counts": Counts in found,
        "histogram": found[Histogram].mantissa_bits if Histogram in found else -1,
        "top": found[TopK].k if TopK in found else 0,
        "samples": found[Sample].n if Sample in found else 0,
        "fingerprint": Fingerprint in found,
        "channels": found[Channels].axis_of(num_axes) if Channels in found else -1,
    }


def length_of(requests: Sequence[Request], shape: Sequence[int]) -> int:
    """Return the length of the vector for a tensor of this shape."""
    asked, numel = attributes_of(requests, len(shape)), math.prod(shape)
    length = 3 + len(_MOMENTS) * asked["moments"] + len(_COUNTS) * asked["counts"]
    length += 2 * asked["fingerprint"] + 2 * min(asked["top"], numel)
    length += min(asked["samples"], numel)
    length += _NUM_OF_CHANNEL * _num_channels(asked["channels"], shape)
    return length + (512 << asked["histogram"] if asked["histogram"] >= 0 else 0)


def _num_channels(axis: int, shape: Sequence[int]) -> int:
    return shape[axis] if axis >= 0 else 0


class Decoder:
    """Reads the vectors of one op ``statistics``.

    Args:
        requests: What the op was asked for, in any order.
        shape: The shape of its tensor.
    """

    def __init__(self, requests: Sequence[Request], shape: Sequence[int]) -> None:
        asked, numel = attributes_of(requests, len(shape)), math.prod(shape)
        self.length = length_of(requests, shape)
        self._num_moments = len(_MOMENTS) if asked["moments"] else 0
        self._num_counts = len(_COUNTS) if asked["counts"] else 0
        self._has_fingerprint = bool(asked["fingerprint"])
        self._top = min(int(asked["top"]), numel)
        self._samples = min(int(asked["samples"]), numel)
        self._bits = int(asked["histogram"])
        self._has_channels = asked["channels"] >= 0
        self._num_channels = _num_channels(asked["channels"], shape)
        # The numbers at the beginning, which become Python's; tensors follow.
        self.num_scalars = 3 + self._num_moments + self._num_counts + 2 * self._has_fingerprint
        self.has_tensors = self.num_scalars < self.length or self._has_channels

    def decode(self, vector: torch.Tensor, scalars: Sequence[float]) -> Statistics:
        """Return the statistics that a vector holds.

        Args:
            vector: float64, shape ``(length,)``, on the CPU; not read without ``has_tensors``.
            scalars: Its first ``num_scalars`` numbers.
        """
        count, nans, infs = int(scalars[0]), int(scalars[1]), int(scalars[2])
        fields: dict[str, Any] = {"count": count, "nans": nans, "infs": infs}
        place = 3
        if self._num_moments:
            moments = scalars[place : place + self._num_moments]
            place += self._num_moments
            fields.update(
                zip(_MOMENTS, moments if count != nans + infs else _NO_MOMENTS, strict=True)
            )
        if self._num_counts:
            counts = map(int, scalars[place : place + self._num_counts])
            place += self._num_counts
            fields.update(zip(_COUNTS, counts, strict=True))
        if self._has_fingerprint:
            fields["fingerprint"] = int(scalars[place + 1]) << 32 | int(scalars[place])
            place += 2
        if self.has_tensors:
            fields.update(self._tensors(vector, place, count))
        return Statistics(**fields)

    def _tensors(self, vector: torch.Tensor, place: int, count: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._top:
            top = vector[place : place + self._top].clone()
            positions = vector[place + self._top : place + 2 * self._top].to(torch.int64)
            place += 2 * self._top
            is_there = positions >= 0
            fields.update(top_values=top[is_there], top_positions=positions[is_there])
        if self._samples:
            fields["samples"] = vector[place : place + self._samples].clone()
            place += self._samples
        if self._bits >= 0:
            bins = vector[place : place + (512 << self._bits)]
            negative, positive = bins.to(torch.int64).chunk(2)
            place += len(bins)
            fields["histogram"] = HistogramCounts(self._bits, negative, positive)
        if self._has_channels:
            fields["channels"] = self._channels(vector[place:], count)
        return fields

    def _channels(self, numbers: torch.Tensor, count: int) -> ChannelStatistics:
        rows = numbers.view(_NUM_OF_CHANNEL, self._num_channels)
        num_counts = len(_CHANNEL_COUNTS)
        counts = dict(zip(_CHANNEL_COUNTS, rows[:num_counts].to(torch.int64), strict=True))
        of_each = count // max(self._num_channels, 1)
        is_finite = counts["nans"] + counts["infs"] < of_each
        moments = rows[num_counts:].where(is_finite, math.nan)
        return ChannelStatistics(
            of_each, **counts, **dict(zip(_CHANNEL_MOMENTS, moments, strict=True))
        )


def decode(vector: torch.Tensor, requests: Sequence[Request], shape: Sequence[int]) -> Statistics:
    """Return the statistics that a vector of the op ``statistics`` holds.

    Args:
        vector: float64, shape ``(length_of(requests, shape),)``, on the CPU.
        requests: What the op was asked for, in any order.
        shape: The shape of its tensor.

    Raises:
        InternalError: The vector has another shape or dtype.
    """
    decoder = Decoder(requests, shape)
    if vector.dtype != torch.float64 or tuple(vector.shape) != (decoder.length,):
        raise InternalError(
            f"decode: the statistics of {math.prod(shape)} values are {decoder.length} numbers in "
            f"float64, got {vector.dtype} of shape {list(vector.shape)}"
        )
    return decoder.decode(vector, vector[: decoder.num_scalars].tolist())


def statistics_of(tensor: torch.Tensor, *requests: Request) -> Statistics:
    """Return statistics of a tensor, computed on the host with PyTorch.

    Counts, the histogram, the largest values, samples and the fingerprint equal those that the
    device computes of the same values; moments, also those of channels, agree to 12 digits. Numbers
    of 64 bits, and integers of 32, are rounded to float32 for the histogram and the counts, and
    float64 for the fingerprint, too.

    Args:
        tensor: Any shape and strides, any dtype that a device may hold or convert, on any device.
        *requests: What to compute besides the numbers of values, NaN and infinities.

    Raises:
        UsageTypeError: The tensor is no tensor, or has another dtype; or a request is none.
        UsageValueError: Two requests of one kind differ, or the tensor does not have the axis of
            the channels.
    """
    check_requests(requests)
    if not isinstance(tensor, torch.Tensor):
        raise UsageTypeError(
            f"statistics_of: got {type(tensor).__name__}, not a tensor; torch.as_tensor makes one."
        )
    if tensor.dtype not in _DTYPES:
        raise UsageTypeError(
            f"statistics_of: there are no statistics of {tensor.dtype} values; convert them to "
            "float32, or pass the real and the imaginary part of complex numbers."
        )
    shape = tuple(tensor.shape)
    for request in set(requests) - set(fitting(requests, len(shape))):
        raise UsageValueError(
            f"statistics_of: {request} asks for an axis that a tensor of shape {list(shape)} does "
            "not have; pass another axis, or leave it out."
        )
    asked = attributes_of(requests, len(shape))
    vector = statistics_vector(tensor.detach().to("cpu"), **asked)  # type: ignore[arg-type]
    return decode(vector, requests, shape)
