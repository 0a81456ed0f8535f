"""The requests for statistics of a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from popsim_torch.errors import UsageValueError

__all__ = [
    "Counts",
    "Fingerprint",
    "Histogram",
    "Moments",
    "Request",
    "Sample",
    "TopK",
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


Request: TypeAlias = Moments | Counts | Histogram | TopK | Sample | Fingerprint


def _check(kind: str, name: str, number: object, most: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= most:
        raise UsageValueError(f"{kind}: {name} is an integer from 1 to {most}, got {number!r}.")
