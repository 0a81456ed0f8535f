"""What a CTC beam search finds, by its definition and step by step."""

import itertools
import math
from collections import defaultdict

Path = tuple[int, ...]
NEVER = -math.inf


def log_sum(*values: float) -> float:
    """Return the logarithm of a sum of probabilities."""
    most = max(values)
    return most if most == NEVER else most + math.log(sum(math.exp(v - most) for v in values))


def collapsed(alignment: Path, blank: int) -> Path:
    """Return the labels of an alignment."""
    return tuple(label for label, _ in itertools.groupby(alignment) if label != blank)


def all_paths(log_probs: list[list[float]], blank: int) -> dict[Path, float]:
    """Return the log-probability of every path: the sum over all of its alignments."""
    paths: defaultdict[Path, float] = defaultdict(lambda: NEVER)
    for alignment in itertools.product(range(len(log_probs[0])), repeat=len(log_probs)):
        total = sum(step[label] for step, label in zip(log_probs, alignment, strict=True))
        path = collapsed(alignment, blank)
        paths[path] = log_sum(paths[path], total)
    return paths


def beam_search(log_probs: list[list[float]], blank: int, width: int) -> dict[Path, float]:
    """Return the paths that are left of a search, the most likely first."""
    beam: dict[Path, tuple[float, float]] = {(): (0.0, NEVER)}  # that end in a blank, a label
    for step in log_probs:
        found: dict[Path, list[list[float]]] = defaultdict(lambda: [[NEVER], [NEVER]])
        for path, (blanks, labels) in beam.items():
            total = log_sum(blanks, labels)
            found[path][0].append(total + step[blank])
            if path:
                found[path][1].append(labels + step[path[-1]])
            for label, value in enumerate(step):
                if label != blank:
                    repeats = path[-1:] == (label,)
                    found[(*path, label)][1].append((blanks if repeats else total) + value)
        sums = {path: (log_sum(*ends[0]), log_sum(*ends[1])) for path, ends in found.items()}
        ranked = sorted(sums.items(), key=lambda item: -log_sum(*item[1]))
        beam = dict(item for item in ranked[:width] if log_sum(*item[1]) > NEVER)
    return {path: log_sum(*ends) for path, ends in beam.items()}
