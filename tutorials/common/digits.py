"""Draws digits, as a replacement for MNIST on a machine without data and network.

Each digit is a few pen strokes in a unit square. A seeded generator picks one
of the ways to write it, bends, turns, scales and shifts the strokes, and picks
the width of the pen. The same seed gives the same images. Shape legend: N
images, S line segments, P pixels, 2 coordinates (x to the right, y downwards).
"""

import os
import shutil
import struct
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Strokes = list[Floats]

SIDE = 28
NUM_TRAIN = 8_000
NUM_TEST = 2_000

_SEED = 2013
_VERSION = 1  # part of the name of the cache folder: increase it if the drawing changes
_IMAGES_PER_CHUNK = 200  # limits the distance table to a few megabytes
_FILES = {"train": ("train", NUM_TRAIN), "test": ("t10k", NUM_TEST)}


def drawn_mnist_root(cache_dir: Path | None = None) -> Path:
    """Return a folder that ``torchvision.datasets.MNIST(root)`` reads.

    The digits are drawn at the first call and kept. The folder appears under
    its name only when it is complete, so parallel first calls are safe.

    Args:
        cache_dir: The folder that contains it; by default the cache folder of the user.
    """
    cache_dir = _user_cache_dir() if cache_dir is None else cache_dir
    root = cache_dir / f"drawn-digits-{_VERSION}"
    if root.is_dir():
        return root
    cache_dir.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".drawn-digits-", dir=cache_dir))
    try:
        write_mnist(unfinished)
        try:
            unfinished.rename(root)
        except OSError:
            if not root.is_dir():  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return root


def write_mnist(root: Path) -> None:
    """Draw both splits and write them as IDX files in torchvision's layout."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split, (prefix, num_images) in _FILES.items():
        seed = _SEED + (split == "test")
        images, labels = draw_digits(num_images, seed)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(_idx(images))
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(_idx(labels))


def draw_digits(num_images: int, seed: int) -> tuple[Bytes, Bytes]:
    """Draw digits of all ten classes in equal shares and random order.

    Returns:
        Images of shape ``(num_images, 28, 28)``, 0 is background and 255 is
        ink, and labels of shape ``(num_images,)``, both uint8.
    """
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(num_images) % 10).astype(np.uint8)
    images = np.empty((num_images, SIDE, SIDE), dtype=np.uint8)
    for digit, ways in enumerate(_ways_to_write()):
        of_digit = np.flatnonzero(labels == digit)
        way_N = rng.integers(len(ways), size=len(of_digit))
        for way, strokes in enumerate(ways):
            chosen = of_digit[way_N == way]
            for start in range(0, len(chosen), _IMAGES_PER_CHUNK):
                part = chosen[start : start + _IMAGES_PER_CHUNK]
                images[part] = _draw(strokes, len(part), rng)
    return images, labels


def _draw(strokes: Strokes, num_images: int, rng: np.random.Generator) -> Bytes:
    """Draw one way of writing a digit, each image with its own distortion."""
    start_S2 = np.concatenate([stroke[:-1] for stroke in strokes])
    end_S2 = np.concatenate([stroke[1:] for stroke in strokes])
    ends_NS2 = _distort(np.concatenate([start_S2, end_S2]), num_images, rng)
    start_NS2, end_NS2 = np.split(ends_NS2, 2, axis=1)
    distance_NP = _distance_to_strokes(start_NS2, end_NS2)
    half_width_N1 = rng.uniform(0.75, 1.65, (num_images, 1)).astype(np.float32)
    # A pen edge one and a half pixels wide looks like a scanned line.
    ink_NP = np.clip((half_width_N1 - distance_NP) / 1.5 + 0.5, 0.0, 1.0)
    return np.rint(ink_NP * 255).astype(np.uint8).reshape(-1, SIDE, SIDE)


def _distort(points_S2: Floats, num_images: int, rng: np.random.Generator) -> Floats:
    """Return the points in pixels, shape (N, S, 2), distorted per image."""

    def draw(low: float, high: float) -> Floats:
        return rng.uniform(low, high, (num_images, 1)).astype(np.float32)

    x_NS = points_S2[:, 0] - 0.5 + np.zeros((num_images, 1), np.float32)
    y_NS = points_S2[:, 1] - 0.5 + np.zeros((num_images, 1), np.float32)
    # Bend the strokes by one slow wave along each axis, like an unsteady hand.
    x_NS, y_NS = (
        x_NS + draw(-0.05, 0.05) * np.sin(np.pi * (2.0 * y_NS + draw(-1.0, 1.0))),
        y_NS + draw(-0.05, 0.05) * np.sin(np.pi * (2.0 * x_NS + draw(-1.0, 1.0))),
    )
    x_NS = x_NS + draw(-0.2, 0.12) * y_NS  # slant
    x_NS, y_NS = x_NS * draw(14.0, 20.0), y_NS * draw(17.5, 21.0)  # pixels
    angle_N1 = draw(-0.2, 0.2)
    cos_N1, sin_N1 = np.cos(angle_N1), np.sin(angle_N1)
    x_NS, y_NS = cos_N1 * x_NS - sin_N1 * y_NS, sin_N1 * x_NS + cos_N1 * y_NS
    middle = (SIDE - 1) / 2
    return np.stack([x_NS + middle + draw(-2, 2), y_NS + middle + draw(-2, 2)], axis=-1)


def _distance_to_strokes(start_NS2: Floats, end_NS2: Floats) -> Floats:
    """Return each pixel's distance to the nearest segment, shape (N, P)."""
    along_NS2 = end_NS2 - start_NS2
    length2_NS = np.maximum((along_NS2**2).sum(-1), np.float32(1e-12))
    row_P, column_P = np.divmod(np.arange(SIDE * SIDE, dtype=np.float32), SIDE)
    nearest2_NP = np.full((len(start_NS2), SIDE * SIDE), np.inf, np.float32)
    for segment in range(start_NS2.shape[1]):
        x_NP = column_P - start_NS2[:, segment, :1]
        y_NP = row_P - start_NS2[:, segment, 1:]
        along_x_N1, along_y_N1 = np.split(along_NS2[:, segment], 2, axis=-1)
        position_NP = (x_NP * along_x_N1 + y_NP * along_y_N1) / length2_NS[:, segment, None]
        position_NP = np.clip(position_NP, 0.0, 1.0)
        x_NP -= position_NP * along_x_N1
        y_NP -= position_NP * along_y_N1
        np.minimum(nearest2_NP, x_NP**2 + y_NP**2, out=nearest2_NP)
    return np.sqrt(nearest2_NP)


def _line(*points: tuple[float, float]) -> Floats:
    return np.array(points, dtype=np.float32)


def _arc(
    center: tuple[float, float], radii: tuple[float, float], start: float, end: float
) -> Floats:
    """Return an arc as points; angles in degrees, 0 to the right, 90 downwards."""
    num_points = max(3, round(abs(end - start) / 24) + 1)
    angle = np.radians(np.linspace(start, end, num_points))
    points = np.stack([np.cos(angle) * radii[0], np.sin(angle) * radii[1]], axis=-1)
    return (points + center).astype(np.float32)


def _path(*parts: Floats) -> Floats:
    """Join parts into one stroke."""
    return np.concatenate(parts)


def _ways_to_write() -> tuple[tuple[Strokes, ...], ...]:
    """Return, per digit 0 to 9, the strokes of each way to write it."""
    ring = _arc((0.5, 0.5), (0.36, 0.48), 0, 360)
    top_bowl = _arc((0.48, 0.26), (0.34, 0.25), -160, 80)
    return (
        ([ring], [_arc((0.5, 0.5), (0.3, 0.48), -80, 280)]),
        (
            [_line((0.5, 0.02), (0.5, 0.98))],
            [_line((0.32, 0.2), (0.52, 0.02), (0.52, 0.98))],
            [_line((0.32, 0.2), (0.52, 0.02), (0.52, 0.98)), _line((0.28, 0.98), (0.76, 0.98))],
        ),
        (
            [_path(_arc((0.5, 0.28), (0.34, 0.26), -170, 35), _line((0.14, 0.96), (0.88, 0.96)))],
            [
                _path(
                    _arc((0.48, 0.28), (0.34, 0.26), -160, 50),
                    _arc((0.28, 0.84), (0.15, 0.12), 80, 330),
                    _line((0.6, 0.97), (0.9, 0.86)),
                )
            ],
        ),
        (
            [_path(top_bowl, _arc((0.47, 0.74), (0.38, 0.24), -80, 155))],
            [
                _path(
                    _line((0.14, 0.04), (0.8, 0.04), (0.46, 0.42)),
                    _arc((0.46, 0.7), (0.38, 0.27), -80, 150),
                )
            ],
        ),
        (
            [
                _line((0.26, 0.04), (0.14, 0.56), (0.86, 0.56)),
                _line((0.74, 0.1), (0.68, 0.98)),
            ],
            [_line((0.7, 0.98), (0.7, 0.02), (0.1, 0.66), (0.92, 0.66))],
        ),
        (
            [
                _path(
                    _line((0.82, 0.04), (0.26, 0.04), (0.2, 0.44)),
                    _arc((0.46, 0.68), (0.38, 0.28), -130, 145),
                )
            ],
            [
                _path(_line((0.26, 0.06), (0.24, 0.42)), _arc((0.44, 0.7), (0.4, 0.27), -110, 140)),
                _line((0.26, 0.06), (0.84, 0.03)),
            ],
        ),
        (
            [
                _path(
                    _arc((0.78, 0.62), (0.6, 0.6), -95, -180),
                    _arc((0.5, 0.7), (0.32, 0.28), 180, -180),
                )
            ],
            [
                _path(
                    _line((0.6, 0.02), (0.3, 0.42)),
                    _arc((0.5, 0.71), (0.34, 0.27), 200, -160),
                )
            ],
        ),
        (
            [_line((0.12, 0.05), (0.86, 0.05), (0.38, 0.98))],
            [_line((0.12, 0.08), (0.86, 0.05), (0.42, 0.98)), _line((0.34, 0.5), (0.8, 0.48))],
            [_line((0.14, 0.2), (0.14, 0.06), (0.84, 0.06), (0.5, 0.56), (0.44, 0.98))],
        ),
        (
            [
                _arc((0.5, 0.26), (0.28, 0.23), 0, 360),
                _arc((0.5, 0.74), (0.35, 0.25), 0, 360),
            ],
            [
                _path(
                    _arc((0.5, 0.25), (0.28, 0.23), -20, -270),
                    _arc((0.5, 0.75), (0.32, 0.23), -90, 180),
                    _line((0.3, 0.6), (0.76, 0.2)),
                )
            ],
        ),
        (
            [
                _arc((0.48, 0.3), (0.32, 0.27), 0, 360),
                _line((0.8, 0.3), (0.76, 0.62), (0.66, 0.98)),
            ],
            [
                _arc((0.48, 0.3), (0.3, 0.26), 0, 360),
                _path(_line((0.78, 0.3), (0.78, 0.7)), _arc((0.5, 0.72), (0.28, 0.25), 0, 130)),
            ],
        ),
    )


def _idx(array: Bytes) -> bytes:
    """Return the array in the IDX format: magic, big-endian sizes, bytes."""
    unsigned_byte = 0x08
    header = struct.pack(f">HBB{array.ndim}I", 0, unsigned_byte, array.ndim, *array.shape)
    return header + array.tobytes()


def _user_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "popsim_torch"
