"""Random numbers, which depend on the seed, the op's stream, the step and the position."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from popsim_torch.reference.call import Call, Run, op

_LANES = 32
_LOW = np.uint64(0xFFFFFFFF)
_ROUNDING = 0x80000000  # keeps the streams of rounding apart from those of random ops


def philox(counters: list[np.ndarray], seed: int) -> list[np.ndarray]:
    """Return four random words for each counter of four words: Philox4x32-10, Salmon et al."""
    words = [np.asarray(word, np.uint64) for word in counters]
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * words[0], np.uint64(0xCD9E8D57) * words[2]
        shift = np.uint64(32)
        words = [
            (second >> shift) ^ words[1] ^ np.uint64(low),
            second & _LOW,
            (first >> shift) ^ words[3] ^ np.uint64(high),
            first & _LOW,
        ]
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return words


def random_words(run: Run, stream: int, count: int) -> np.ndarray:
    """Return the 32 random bits of each element of a tensor, a whole number of groups of 128.

    Element ``e`` of a group is word ``e / 32`` of counter ``e % 32``.
    """
    groups = -(-count // (4 * _LANES))
    numbers = np.arange(groups * _LANES, dtype=np.uint64) & _LOW
    step = run.position.step & 0xFFFFFFFFFFFFFFFF
    fixed = (stream & 0xFFFFFFFF, step & 0xFFFFFFFF, step >> 32)
    counters = [numbers, *(np.full_like(numbers, value) for value in fixed)]
    words = philox(counters, run.seed)
    return np.stack([word.reshape(groups, _LANES) for word in words], 1).reshape(-1)


def _unit(words: np.ndarray) -> np.ndarray:
    """Return numbers in [0, 1) of 24 bits."""
    return (words >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)


def _normal(words: np.ndarray) -> np.ndarray:
    """Return standard normal numbers: Box and Muller's pairs, 32 elements apart."""
    radius, angle = words.reshape(-1, 2, _LANES).transpose(1, 0, 2)
    # In (0, 1], because the logarithm follows.
    drawn = radius.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    length = np.sqrt(-2.0 * np.log(drawn.astype(np.float64)))
    turn = _unit(angle).astype(np.float64) * 2 * math.pi
    return np.stack([length * np.cos(turn), length * np.sin(turn)], 1).reshape(-1)


def _below(bound: float, dtype: torch.dtype) -> float:
    """Return the largest number of a type below a bound."""
    nearest = torch.tensor(bound).to(dtype)
    if float(nearest) < bound:
        return float(nearest)
    return float(torch.nextafter(nearest, torch.tensor(-math.inf, dtype=dtype)))


@op
def random(call: Call, probabilities: Tensor | None = None) -> Tensor:
    """Return random numbers of a distribution."""
    shape, dtype = call["shape"], call.dtypes[0]
    assert dtype is not None
    count = math.prod(shape)
    words = random_words(call.run, call["stream"], count)
    if call["distribution"] == "bernoulli":
        p = torch.tensor(call.get("p", 0.0)) if probabilities is None else probabilities.float()
        drawn = torch.from_numpy(_unit(words)[:count]).reshape(shape)
        return (drawn < p).to(torch.float32)
    if call["distribution"] == "normal":
        values = call["mean"] + call["std"] * _normal(words)
    else:
        low, high = call["from"], call["to"]
        limit = max(np.float32(low), np.float32(_below(high, dtype)))
        spread = np.float64(np.float32(high - low))
        values = np.minimum(_unit(words) * spread + np.float32(low), limit)
    return torch.from_numpy(np.asarray(values, np.float64)[:count]).reshape(shape).float()


def round_at_random(run: Run, x: Tensor, stream: int) -> Tensor:
    """Return float32 numbers, each rounded at random to one of its two float16 neighbours."""
    if run.wide:
        return x
    words = random_words(run, stream | _ROUNDING, x.numel())[: x.numel()]
    value = np.ascontiguousarray(x.float().numpy()).reshape(-1)
    # Numbers that would be rounded to infinity, and NaN, do not change.
    kept = ~(np.abs(value) < 65520.0)
    size = np.where(kept, 0, np.abs(value))
    # The distance of neighbours; below 2 ** -14 it is the smallest float16 number.
    _, exponent = np.frexp(size)
    unit = np.ldexp(np.float64(1), np.maximum(exponent - 11, -24))
    steps = size.astype(np.float64) / unit
    whole = np.floor(steps)
    # The share of the 2 ** 13 (2 ** 24) random numbers that round up is the position in the step.
    normal = size >= 2.0**-14
    dropped = (words & np.uint64(0x1FFF)).astype(np.float64) / 2.0**13
    up = np.where(normal, steps - whole + dropped >= 1, _unit(words) < steps - whole)
    rounded = np.minimum((whole + up) * unit, 65504.0)
    result = np.where(kept, value, np.copysign(rounded, value)).astype(np.float32)
    return torch.from_numpy(result).reshape(x.shape)


@op
def stochastic_round(call: Call, x: Tensor) -> Tensor:
    """Return float16 numbers whose expected values are the given numbers."""
    return round_at_random(call.run, x, call["stream"])


def mix_seed(seed: int, stream: int, step: int) -> int:
    """Return one number for three numbers: splitmix64 over all of them."""
    mask = 0xFFFFFFFFFFFFFFFF
    mixed = seed & mask
    for key in (stream, step):
        mixed = (mixed + 0x9E3779B97F4A7C15 * (key + 1)) & mask
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & mask
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
        mixed ^= mixed >> 31
    return mixed
