"""The search functions for models: check their arguments and call an operator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.ops import op_listener
from popsim_torch.searches.operators import CTC_BEAM_SEARCH, FPS, NEAREST
from popsim_torch.trace.graph.device import DEVICE

__all__ = ["ctc_beam_search_decoder", "fps", "nearest"]

_INDICES = (torch.int32, torch.int64)
_MOST_SEQUENCES = 2**26


def fps(
    src: torch.Tensor,
    ptr: Sequence[int],
    ratio: float = 0.5,
    random_start: bool = False,
) -> torch.Tensor:
    """Sample each segment of a table of points, by repeatedly taking the farthest point.

    The first sample of a segment is its first point, or a random one. Each further sample is the
    point with the longest distance to the nearest sample so far; of several such points the one in
    the lowest row. No point is taken twice. Distances are Euclidean, in float32; a distance that is
    NaN counts as infinite.

    Args:
        src: Points, shape ``(n, d)`` or ``(n,)``, floating point.
        ptr: Bounds of the segments, in ascending order: rows ``ptr[i]`` to ``ptr[i + 1] - 1`` are
            one segment. Segments may be empty, and rows before the first and after the last bound
            belong to no segment.
        ratio: Share of a segment's points to take, above 0 and up to 1.
        random_start: Whether to draw the first point of each segment at random: a new one in each
            micro-batch, from the model's seed.

    Returns:
        Rows of ``src``, ``ceil(ratio * size)`` for each segment in their order, integers.

    Raises:
        Error: An argument has another type (also a ``TypeError``), or a value that it may not have
            (also a ``ValueError``).
    """
    points = _points("fps", "src", src)
    bounds = _whole_numbers("fps", "ptr", ptr)
    _check_bounds(bounds, points.shape[0])
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)):
        raise _wrong_type("fps", "ratio", "a number", ratio)
    if not 0 < ratio <= 1:
        raise UsageValueError(f"fps: ratio must be above 0 and at most 1, got {ratio}.")
    if not isinstance(random_start, bool):
        raise _wrong_type("fps", "random_start", "True or False", random_start)
    counts = [math.ceil(ratio * (end - first)) for first, end in pairwise(bounds)]
    if sum(counts) == 0:
        raise UsageValueError("fps: all segments of ptr are empty, so there is nothing to sample.")
    starts = None
    if random_start:
        device = src.device if op_listener.get() is None else DEVICE
        starts = torch.rand(len(counts), dtype=torch.float32, device=device)
    rows: torch.Tensor = FPS(points, starts, bounds, counts)
    return rows


def nearest(
    x: torch.Tensor,
    y: torch.Tensor,
    batch_x: Sequence[int] | torch.Tensor | None = None,
    batch_y: Sequence[int] | torch.Tensor | None = None,
) -> torch.Tensor:
    """Return for each row of ``x`` the nearest row of ``y`` in its batch.

    Distances are Euclidean, in float32; of several nearest rows the lowest one is returned. A
    distance that is NaN counts as infinite.

    Args:
        x: Points, shape ``(n, d)`` or ``(n,)``, floating point.
        y: Points to compare with, shape ``(m, d)`` or ``(m,)``, floating point; at least one.
        batch_x: The batch of each row of ``x``: ``n`` integers in ascending order, as a list or a
            tensor. None means that all rows are in batch 0.
        batch_y: The batch of each row of ``y``, in the same form.

    Returns:
        Rows of ``y``, shape ``(n,)``, integers.

    Raises:
        Error: An argument has another type (also a ``TypeError``), or a value that it may not have
            (also a ``ValueError``): batches that are not in ascending order, or a batch of ``x``
            without a row in ``y``. If tensors of the device have such values, the run fails.
    """
    points, others = _points("nearest", "x", x), _points("nearest", "y", y)
    if points.shape[1] != others.shape[1]:
        raise UsageValueError(
            f"nearest: points of x have {points.shape[1]} coordinates, those of y have "
            f"{others.shape[1]}; the numbers must be equal."
        )
    if others.shape[0] == 0:
        raise UsageValueError("nearest: y has no rows, so none of them is the nearest.")
    if batch_x is None and batch_y is None:
        rows: torch.Tensor = NEAREST(points, others, None, None)
        return rows
    of_x = _batch("batch_x", batch_x, points)
    of_y = _batch("batch_y", batch_y, others)
    if isinstance(batch_x, (list, tuple)) and not isinstance(batch_y, torch.Tensor):
        missing = set(batch_x) - set(batch_y or (0,))
        if missing:
            raise UsageValueError(
                f"nearest: x has rows of batch {min(missing)}, and y has none to compare them with."
            )
    rows = NEAREST(points, others, of_x, of_y)
    return rows


def ctc_beam_search_decoder(
    probs: torch.Tensor,
    lengths: torch.Tensor,
    blank: int = 0,
    beam_width: int = 100,
    top_paths: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the most likely labels of sequences, by a beam search over their beginnings.

    The probability of a path of labels is the sum over all alignments with the steps that become
    this path when repeated labels count once and blanks are removed. After each step the search
    keeps the ``beam_width`` most likely paths; with all possible paths it is exact. It computes in
    float64. Equally likely paths are ordered as their beginnings were; then the shorter path is
    first; then the one with the smaller label.

    Args:
        probs: Log-probabilities, shape ``(steps, batch, classes)``, floating point.
        lengths: The number of steps in each sequence, shape ``(batch,)``, integers. The run fails
            for lengths that are negative or above ``steps``.
        blank: The class that is not a label.
        beam_width: The number of paths that the search keeps, at least 1.
        top_paths: The number of paths to return, up to ``beam_width``.

    Returns:
        Three tensors, the most likely path first: log-probabilities, shape ``(batch, top_paths)``,
        in the dtype of ``probs``; numbers of labels, shape ``(batch, top_paths)``, integers; and
        labels, shape ``(batch, top_paths, steps)``, integers, with blanks after the last label. If
        there are fewer paths, the log-probability of the others is minus infinity, and they have no
        labels. If a log-probability within the length of a sequence is NaN or plus infinity, those
        of the sequence's paths are NaN, and they have no labels.

    Raises:
        Error: An argument has another type (also a ``TypeError``), or a value that it may not have
            (also a ``ValueError``).
    """
    name = "ctc_beam_search_decoder"
    for argument, value in (("probs", probs), ("lengths", lengths)):
        if not isinstance(value, torch.Tensor):
            raise _wrong_type(name, argument, "a torch.Tensor", value)
    if probs.dim() != 3 or probs.numel() == 0:
        raise UsageValueError(
            f"{name}: probs must have shape (steps, batch, classes), with elements; got "
            f"{tuple(probs.shape)}."
        )
    steps, items, classes = probs.shape
    if tuple(lengths.shape) != (items,):
        raise UsageValueError(
            f"{name}: lengths must have shape ({items},), one for each sequence of probs; got "
            f"{tuple(lengths.shape)}."
        )
    numbers = {"blank": blank, "beam_width": beam_width, "top_paths": top_paths}
    most_paths = _MOST_SEQUENCES // steps
    _check_numbers(name, numbers, {"blank": classes - 1, "beam_width": most_paths})
    if top_paths > beam_width:
        raise UsageValueError(
            f"{name}: top_paths is {top_paths}, but a beam_width of {beam_width} keeps fewer paths."
        )
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = CTC_BEAM_SEARCH(
        _floating(name, "probs", probs),
        _integers(name, "lengths", lengths),
        blank,
        beam_width,
        top_paths,
    )
    return results


def _check_numbers(name: str, numbers: dict[str, Any], most: dict[str, int]) -> None:
    """Refuse numbers of a wrong type or out of range."""
    for argument, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong_type(name, argument, "an int", value)
        least = 0 if argument == "blank" else 1
        limit = most.get(argument)
        if value < least or (limit is not None and value > limit):
            upto = "" if limit is None else f" to {limit}"
            raise UsageValueError(f"{name}: {argument} must be from {least}{upto}, got {value}.")


def _points(name: str, argument: str, value: object) -> torch.Tensor:
    """Return points as rows."""
    if not isinstance(value, torch.Tensor):
        raise _wrong_type(name, argument, "a torch.Tensor", value)
    if value.dim() not in (1, 2) or value.shape[1:] == (0,):
        raise UsageValueError(
            f"{name}: {argument} must have shape (points, coordinates) or (points,), with a "
            f"coordinate at least; got {tuple(value.shape)}."
        )
    value = _floating(name, argument, value)
    return value.unsqueeze(1) if value.dim() == 1 else value


def _floating(name: str, argument: str, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the form for the op: in a dtype of the device, and without a gradient."""
    if not value.is_floating_point():
        raise UsageTypeError(f"{name}: {argument} must be floating-point, got {value.dtype}.")
    return (value.float() if value.dtype == torch.float64 else value).detach()


def _integers(name: str, argument: str, value: torch.Tensor) -> torch.Tensor:
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise UsageTypeError(f"{name}: {argument} must be integers, got {value.dtype}.")
    return value if value.dtype in _INDICES else value.long()


def _whole_numbers(name: str, argument: str, value: Any) -> list[int]:
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(item, int) and not isinstance(item, bool) for item in value
    ):
        raise _wrong_type(name, argument, "a list of Python ints", value)
    return list(value)


def _check_bounds(bounds: list[int], num_points: int) -> None:
    if len(bounds) < 2:
        raise UsageValueError(
            f"fps: ptr must have the bounds of a segment at least, two numbers; got {bounds}."
        )
    for first, end in pairwise(bounds):
        if first > end:
            raise UsageValueError(f"fps: ptr must ascend, but {end} follows {first}.")
    if bounds[0] < 0 or bounds[-1] > num_points:
        raise UsageValueError(
            f"fps: ptr must be within 0 and {num_points}, the number of points; it goes from "
            f"{bounds[0]} to {bounds[-1]}."
        )


def _batch(argument: str, given: Any, points: torch.Tensor) -> torch.Tensor:
    """Return the batch of each point as a tensor; check the values if they are known."""
    num_points = points.shape[0]
    if given is None:
        return torch.zeros(num_points, dtype=torch.int64, device=points.device)
    if isinstance(given, torch.Tensor):
        if tuple(given.shape) != (num_points,):
            raise _wrong_length(argument, num_points, tuple(given.shape))
        return _integers("nearest", argument, given)
    numbers = _whole_numbers("nearest", argument, given)
    if len(numbers) != num_points:
        raise _wrong_length(argument, num_points, (len(numbers),))
    for first, second in pairwise(numbers):
        if first > second:
            raise UsageValueError(f"nearest: {argument} must ascend, but {second} follows {first}.")
    return torch.tensor(numbers, dtype=torch.int64, device=points.device)


def _wrong_length(argument: str, num_points: int, shape: tuple[int, ...]) -> UsageValueError:
    return UsageValueError(
        f"nearest: {argument} must have shape ({num_points},), a number for each point; got "
        f"{shape}."
    )


def _wrong_type(name: str, argument: str, needed: str, given: object) -> UsageTypeError:
    found = _kind(given)
    if isinstance(given, (list, tuple)):
        found += f" of {' and '.join(sorted(set(map(_kind, given)))) or 'nothing'}"
    return UsageTypeError(f"{name}: {argument} must be {needed}, got {found}.")


def _kind(value: object) -> str:
    return "Tensor" if isinstance(value, torch.Tensor) else type(value).__name__
