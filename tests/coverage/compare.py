"""Compares results with those of eager PyTorch: values, or means of drawn values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from popsim_torch.dtypes import returned_dtype
from tests.coverage.call import is_inexact, parts

# How much results may differ: relative to each value, and to the largest value.
_TOLERANCES = {torch.float16: 2e-3, torch.float32: 2e-5, torch.float64: 2e-5}
# Results may also be so many times further away from those in float64 than eager PyTorch's.
_TIMES_AS_FAR = 4
_NUM_DRAWS = 48
_SIGMAS = 6

Tensors = Sequence[torch.Tensor]


def types_problem(expected: Tensors, actual: Tensors) -> str:
    """Return in what the structure, shapes or dtypes differ; empty if they do not."""
    if len(expected) != len(actual):
        return f"{len(actual)} results instead of {len(expected)}"
    for i, (one, other) in enumerate(zip(expected, actual, strict=True)):
        if one.shape != other.shape:
            return f"result {i}: shape {tuple(other.shape)} instead of {tuple(one.shape)}"
        # Statistics of float16 numbers are float32.
        statistics = i > 0 and (one.dtype, other.dtype) == (torch.float16, torch.float32)
        if other.dtype != returned_dtype(one.dtype) and not statistics:
            return f"result {i}: {other.dtype} instead of {returned_dtype(one.dtype)}"
    return ""


def values_problem(expected: Tensors, actual: Tensors, wide: Tensors | None) -> str:
    """Return in what results differ; empty if they do not.

    Args:
        expected: The results of eager PyTorch.
        actual: The results of the device.
        wide: The results of eager PyTorch in float64, if there are any.
    """
    problem = types_problem(expected, actual)
    if problem:
        return problem
    if wide is None or len(wide) != len(expected):
        wide = expected
    for i, (one, other, exact) in enumerate(zip(expected, actual, wide, strict=True)):
        if is_inexact(one):
            problem = _floats_problem(one, other, exact)
        else:
            count = int((other.to(one.dtype) != one).sum())
            problem = f"{count} of {one.numel()} values differ" if count else ""
        if problem:
            return f"result {i}: {problem}"
    return ""


def _floats_problem(expected: torch.Tensor, actual: torch.Tensor, exact: torch.Tensor) -> str:
    exact = exact.to(expected.dtype) if exact.shape == expected.shape else expected
    expected, actual, exact = parts(expected), parts(actual), parts(exact)
    # The device holds bfloat16 as float32.
    tolerance = 1e-2 if expected.dtype == torch.bfloat16 else _TOLERANCES[expected.dtype]
    one, other, exact = expected.double(), actual.double(), exact.double()
    if _are_close(one, other, tolerance) or _are_close(exact, other, tolerance):
        return ""
    if not torch.equal(one.isfinite(), other.isfinite()):
        return "NaN or infinity differ"
    finite = one.isfinite() & exact.isfinite()
    if not bool(finite.any()):
        return "NaN and infinity differ"
    own, theirs = (float((x - exact)[finite].abs().max()) for x in (other, one))
    if own <= _TIMES_AS_FAR * theirs:
        return ""
    return f"values differ by {float((one - other)[finite].abs().max()):.3g}"


def _are_close(expected: torch.Tensor, actual: torch.Tensor, tolerance: float) -> bool:
    finite = expected[expected.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 1.0
    atol = tolerance * max(scale, 1e-2)
    return torch.allclose(actual, expected, tolerance, atol, equal_nan=True)


def draws_problem(draw: Callable[[], Tensors], draw_eager: Callable[[], Tensors]) -> str:
    """Return in what means of drawn results differ; empty if they do not.

    Args:
        draw: Returns new results of the device.
        draw_eager: Returns new results of eager PyTorch.
    """
    problem = types_problem(draw_eager(), draw())
    if problem:
        return problem
    pairs = zip(_means(draw_eager), _means(draw), strict=True)
    for i, ((mean, error), (other, other_error)) in enumerate(pairs):
        allowed = _SIGMAS * (error**2 + other_error**2) ** 0.5 + 1e-3 * abs(mean)
        if abs(mean - other) > allowed:
            return f"result {i}: mean {other:.3g} instead of {mean:.3g}"
    return ""


def _means(draw: Callable[[], Tensors]) -> list[tuple[float, float]]:
    """Return a mean of each result, and its standard error.

    Some distributions have no mean: that of the arc tangent always exists.
    """
    found = []
    for results in zip(*(draw() for _ in range(_NUM_DRAWS)), strict=True):
        means = torch.stack([parts(r).double().atan().sum() / max(r.numel(), 1) for r in results])
        found.append((float(means.mean()), float(means.std()) / _NUM_DRAWS**0.5))
    return found
