"""Arrays as bytes, in the fields of a record that have more than one number."""

from __future__ import annotations

import struct
import zlib

import numpy
import torch

from popsim_torch.statistics import MOST_SAMPLES, MOST_TOP, ChannelStatistics, HistogramCounts

__all__ = [
    "bytes_of_channels",
    "bytes_of_histogram",
    "bytes_of_samples",
    "bytes_of_top",
    "channels_of",
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
_CHANNEL_COUNTS = ("zeros", "nans", "infs")
_CHANNEL_MOMENTS = ("mean", "norm", "minimum", "maximum")
_MOST_COMPRESSED = 1100  # bytes that zlib makes of one, at most
_OF_CHANNELS = struct.Struct("<qq")  # the number of channels, and of values of each


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
    raw = _unpacked(data[1:], 2 * num_bins * 8, "a histogram")
    counts = torch.from_numpy(numpy.frombuffer(raw, "<i8").astype("int64"))
    return HistogramCounts(mantissa_bits, counts[:num_bins], counts[num_bins:])


def bytes_of_channels(channels: ChannelStatistics) -> bytes:
    """Return statistics of channels as bytes: their numbers, and the compressed arrays."""
    arrays = [getattr(channels, name).numpy().astype("<i8") for name in _CHANNEL_COUNTS]
    arrays += [getattr(channels, name).numpy().astype("<f8") for name in _CHANNEL_MOMENTS]
    raw = b"".join(array.tobytes() for array in arrays)
    numbers = _OF_CHANNELS.pack(len(channels.zeros), channels.count)
    return numbers + zlib.compress(raw, _COMPRESSION)


def channels_of(data: bytes) -> ChannelStatistics:
    """Return the statistics of channels in bytes.

    Raises:
        ValueError: They are not as ``bytes_of_channels`` makes them.
    """
    if len(data) < _OF_CHANNELS.size:
        raise ValueError("statistics of channels of an unknown form")
    number, count = _OF_CHANNELS.unpack_from(data)
    packed = data[_OF_CHANNELS.size :]
    size = 8 * number
    names = (*_CHANNEL_COUNTS, *_CHANNEL_MOMENTS)
    # What is claimed is more than can be: nothing is made of it.
    if number < 0 or count < 0 or size * len(names) > _MOST_COMPRESSED * len(packed):
        raise ValueError("statistics of channels of another size")
    raw = _unpacked(packed, size * len(names), "statistics of channels")
    fields = {}
    for i, name in enumerate(names):
        kind = "<i8" if name in _CHANNEL_COUNTS else "<f8"
        array = numpy.frombuffer(raw[i * size : (i + 1) * size], kind)
        fields[name] = torch.from_numpy(array.astype(kind[1:]))
    return ChannelStatistics(count, **fields)


def _unpacked(data: bytes, size: int, what: str) -> bytes:
    """Return compressed bytes as they were. A file may claim more: no more than ``size`` is made.

    Raises:
        ValueError: They are damaged, or of another size.
    """
    unpacker = zlib.decompressobj()
    try:
        # (0 would be no limit.)
        raw = unpacker.decompress(data, max(size, 1))
    except zlib.error as error:
        raise ValueError(f"{what} that is damaged ({error})") from error
    if len(raw) != size or unpacker.unconsumed_tail.strip(b"\0"):
        raise ValueError(f"{what} of another size")
    return raw
