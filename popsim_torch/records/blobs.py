"""Arrays as bytes, in the fields of a record that have more than one number."""

from __future__ import annotations

import struct
import zlib

import numpy
import torch

from popsim_torch.statistics import MOST_SAMPLES, MOST_TOP, HistogramCounts

__all__ = [
    "bytes_of_histogram",
    "bytes_of_samples",
    "bytes_of_top",
    "histogram_of",
    "samples_of",
    "top_of",
]

# The first byte of samples. Numbers of the device have at most 32 bits, but not all integers of 32
# bits are numbers in float32.
_FORMS = {b"f": "<f4", b"d": "<f8"}
_BINS = 256
# Most counts are 0: more effort takes three times as long, and saves few bytes.
_COMPRESSION = 1
_MOST_MANTISSA_BITS = 3


def bytes_of_samples(samples: torch.Tensor) -> bytes:
    """Return samples (float64, one axis) as bytes, in float32 if this loses nothing."""
    wide = samples.tolist()
    try:
        narrow = struct.pack(f"<{len(wide)}f", *wide)
    except OverflowError:
        narrow = b""
    back = struct.unpack(f"<{len(narrow) // 4}f", narrow)
    if len(back) == len(wide) and all(
        one == other or other != other for one, other in zip(back, wide, strict=True)
    ):
        return b"f" + narrow
    return b"d" + struct.pack(f"<{len(wide)}d", *wide)


def samples_of(data: bytes) -> torch.Tensor:
    """Return the samples in bytes, in float64.

    Raises:
        ValueError: They are not as ``bytes_of_samples`` makes them.
    """
    if data[:1] not in _FORMS or len(data) > 1 + 8 * MOST_SAMPLES:
        raise ValueError("samples of an unknown form")
    return torch.from_numpy(numpy.frombuffer(data, _FORMS[data[:1]], offset=1).astype("float64"))


def bytes_of_top(values: torch.Tensor, positions: torch.Tensor) -> bytes:
    """Return values (float64) and their positions (int64) as bytes."""
    return values.numpy().astype("<f8").tobytes() + positions.numpy().astype("<i8").tobytes()


def top_of(data: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values and positions in bytes.

    Raises:
        ValueError: They are not as ``bytes_of_top`` makes them.
    """
    if len(data) % 16 or len(data) > 16 * MOST_TOP:
        raise ValueError("largest values of an unknown form")
    half = len(data) // 2
    values = numpy.frombuffer(data[:half], "<f8").astype("float64")
    positions = numpy.frombuffer(data[half:], "<i8").astype("int64")
    return torch.from_numpy(values), torch.from_numpy(positions)


def bytes_of_histogram(histogram: HistogramCounts) -> bytes:
    """Return a histogram as bytes: the bits of the mantissa, and the compressed counts."""
    counts = torch.cat([histogram.negative, histogram.positive]).numpy().astype("<i8")
    return bytes([histogram.mantissa_bits]) + zlib.compress(counts.tobytes(), _COMPRESSION)


def histogram_of(data: bytes) -> HistogramCounts:
    """Return the histogram in bytes.

    Raises:
        ValueError: It is not as ``bytes_of_histogram`` makes it.
    """
    mantissa_bits = data[0] if data else -1
    if mantissa_bits not in range(_MOST_MANTISSA_BITS + 1):
        raise ValueError("a histogram of an unknown form")
    num_bins = _BINS << mantissa_bits
    size = 2 * num_bins * 8
    # A file may claim more: no more than this is made of it.
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(data[1:], size)
    except zlib.error as error:
        raise ValueError(f"a histogram that is damaged ({error})") from error
    if len(raw) != size or unpacker.unconsumed_tail.strip(b"\0"):
        raise ValueError("a histogram of another size")
    counts = torch.from_numpy(numpy.frombuffer(raw, "<i8").astype("int64"))
    return HistogramCounts(mantissa_bits, counts[:num_bins], counts[num_bins:])
