"""The requests for statistics of a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from popsim_torch.errors import UsageTypeError, UsageValueError

__all__ = [
    "Channels",
    "Counts",
    "Fingerprint",
    "Histogram",
    "Moments",
    "Request",
    "Sample",
    "TopK",
    "fitting",
]

MOST_TOP = 64
MOST_SAMPLES = 4096


@dataclass(frozen=True)
class Moments:
    """Asks for mean, standard deviation, minimum, maximum, norm and mean absolute value."""


@dataclass(frozen=True)
class Counts:
    """Asks for the numbers of zeros, subnormals, and values that float16 cannot hold."""


@dataclass(frozen=True)
class Channels:
    """Asks for zeros, NaN, infinities, mean, norm and extremes of each channel of a tensor.

    A channel is an index of one axis: a unit of a linear layer, or a channel of an image. A tensor
    that does not have this axis gets no statistics of channels.

    Attributes:
        axis: The axis, of a micro-batch; negative ones count from the last. 1 is that of the units
            in the result of a linear layer, ``(samples, units)``, and of the channels of images,
            ``(samples, channels, height, width)``; -1 that of units behind further axes; 0 that of
            the rows of a weight.

    Raises:
        UsageTypeError: The axis is not an integer.
    """

    axis: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.axis, bool) or not isinstance(self.axis, int):
            raise UsageTypeError(
                f"Channels: axis is an integer such as 1 or -1, got {self.axis!r}."
            )

    def axis_of(self, num_axes: int) -> int:
        """Return the axis, counted from 0, of a tensor with some axes; -1 if it has no such one."""
        axis = self.axis + num_axes if self.axis < 0 else self.axis
        return axis if 0 <= axis < num_axes else -1


@dataclass(frozen=True)
class Histogram:
    """Asks for the number of values in each bin; the bins cover all numbers, so none is outside.

    A bin holds the numbers of one sign that have the same exponent in float32, and the same first
    bits of the mantissa.

    Attributes:
        mantissa_bits: The number of bits of the mantissa, 0 to 3: each one halves the bins.

    Raises:
        UsageValueError: Another number of bits.
    """

    mantissa_bits: int = 0

    def __post_init__(self) -> None:
        if self.mantissa_bits not in range(4):
            raise UsageValueError(
                f"Histogram: mantissa_bits is 0, 1, 2 or 3, got {self.mantissa_bits!r}."
            )


@dataclass(frozen=True)
class TopK:
    """Asks for the values with the largest magnitudes, and their positions.

    Attributes:
        k: How many, 1 to 64.

    Raises:
        UsageValueError: Another number.
    """

    k: int = 8

    def __post_init__(self) -> None:
        _check("TopK", "k", self.k, MOST_TOP)


@dataclass(frozen=True)
class Sample:
    """Asks for values at equal distances: those at ``i * count // n`` in row-major order.

    Attributes:
        n: How many, 1 to 4096; a smaller tensor gives all its values.

    Raises:
        UsageValueError: Another number.
    """

    n: int = 16

    def __post_init__(self) -> None:
        _check("Sample", "n", self.n, MOST_SAMPLES)


@dataclass(frozen=True)
class Fingerprint:
    """Asks for a number of 64 bits that changes if any bit of the tensor, or its place, does."""


Request: TypeAlias = Moments | Counts | Histogram | TopK | Sample | Fingerprint | Channels


def fitting(requests: Iterable[Request], num_axes: int) -> tuple[Request, ...]:
    """Return the requests without those for channels of an axis that a tensor does not have."""
    return tuple(
        one for one in requests if not isinstance(one, Channels) or one.axis_of(num_axes) >= 0
    )


def of_pairs(requests: Iterable[Request], num_axes: int) -> tuple[Request, ...]:
    """Return the requests for a tensor that has its complex numbers as pairs, along a further axis.

    Args:
        requests: Those that fit the tensor of complex numbers.
        num_axes: The number of its axes.
    """
    return tuple(
        replace(one, axis=one.axis_of(num_axes)) if isinstance(one, Channels) else one
        for one in requests
    )


def _check(kind: str, name: str, number: object, most: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= most:
        raise UsageValueError(f"{kind}: {name} is an integer from 1 to {most}, got {number!r}.")
