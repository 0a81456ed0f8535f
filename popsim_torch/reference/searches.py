"""Searches: farthest and nearest rows of tables, and the likeliest labels of a sequence."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from popsim_torch.reference.call import Call, op

Maybe = Tensor | None


def _squares(rows: Tensor, row: Tensor) -> Tensor:
    return (rows - row).square().sum(-1)


@op
def fps(call: Call, points: Tensor, starts: Maybe = None) -> Tensor:
    """Return rows of each segment, each one the farthest from those chosen before it."""
    chosen: list[int] = []
    bounds = call["bounds"]
    for segment, count in enumerate(call["counts"]):
        first, last = bounds[segment], bounds[segment + 1]
        rows = points[first:last]
        position = 0.0 if starts is None else float(starts[segment]) * len(rows)
        row = int(min(position, len(rows) - 1)) if position >= 0 else 0
        distances = torch.full((len(rows),), math.inf, dtype=points.dtype)
        for number in range(count):
            if number:
                squares = _squares(rows, rows[row])
                distances = torch.where(squares < distances, squares, distances)
                row = int(distances.argmax())
            distances[row] = -1.0
            chosen.append(first + row)
    return torch.tensor(chosen, dtype=torch.int64)


@op
def nearest(
    call: Call, x: Tensor, y: Tensor, batch_x: Maybe = None, batch_y: Maybe = None
) -> Tensor:
    """Return for each row of x the nearest row of y, among those of the same batch."""
    found = []
    for number, row in enumerate(x):
        squares = _squares(y, row)
        other = torch.zeros(len(y), dtype=torch.bool)
        if batch_x is not None and batch_y is not None:
            other = batch_y != batch_x[number]
        # NaN distances count as infinite, but rows of another batch come even after them.
        squares = squares.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(other, math.inf)
        at = int(squares.argmin())
        found.append(int((~other).nonzero()[0]) if squares[at] == math.inf else at)
    return torch.tensor(found, dtype=torch.int64)


def _log_sum(values: Iterable[float]) -> float:
    values = list(values)
    most = max(values)
    return most if most == -math.inf else most + math.log(sum(math.exp(v - most) for v in values))


def _beam(
    log_probs: list[list[float]], blank: int, width: int
) -> list[tuple[tuple[int, ...], float]]:
    """Return the most probable sequences of labels, and the logarithms of their probabilities."""
    never = -math.inf
    beam: dict[tuple[int, ...], tuple[float, float]]
    beam = {(): (0.0, never)}  # alignments that end in a blank, and in the last label
    for step in log_probs:
        found: dict[tuple[int, ...], list[list[float]]] = defaultdict(lambda: [[never], [never]])
        for path, (blanks, labels) in beam.items():
            total = _log_sum((blanks, labels))
            found[path][0].append(total + step[blank])
            if path:
                found[path][1].append(labels + step[path[-1]])
            for label, value in enumerate(step):
                if label != blank:
                    repeats = path[-1:] == (label,)
                    found[(*path, label)][1].append((blanks if repeats else total) + value)
        sums = {path: (_log_sum(ends[0]), _log_sum(ends[1])) for path, ends in found.items()}
        ranked = sorted(sums.items(), key=lambda item: -_log_sum(item[1]))
        beam = dict(item for item in ranked[:width] if _log_sum(item[1]) > never)
    return [(path, _log_sum(ends)) for path, ends in beam.items()]


@op
def ctc_beam_search(
    call: Call, log_probs: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, lengths and labels of each item's most probable sequences.

    The labels are padded with blanks.
    """
    steps, items, _ = log_probs.shape
    top = call["top_paths"]
    scores = torch.full((items, top), -math.inf, dtype=log_probs.dtype)
    sizes = torch.zeros(items, top, dtype=torch.int64)
    paths = torch.full((items, top, steps), call["blank"], dtype=torch.int64)
    for item in range(items):
        read = log_probs[: int(lengths[item]), item].tolist()
        for rank, (path, score) in enumerate(_beam(read, call["blank"], call["beam_width"])[:top]):
            scores[item, rank] = score
            sizes[item, rank] = len(path)
            paths[item, rank, : len(path)] = torch.tensor(path, dtype=torch.int64)
    return scores, sizes, paths
