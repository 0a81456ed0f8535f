"""The command ``popsim diff``."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence

from popsim_torch.errors import Error
from popsim_torch.records.comparison import compare
from popsim_torch.records.reader import Run

__all__ = ["diff"]

_EQUAL, _DIFFERENT, _USAGE_ERROR = 0, 1, 2
_TOO_LITTLE_COMPARED = _USAGE_ERROR


def diff(arguments: Sequence[str]) -> int:
    """Compare two runs, and print where they first differ.

    Args:
        arguments: The arguments of the command line after ``diff``.

    Returns:
        The exit code: 0 if the runs are equal, 1 if they differ, 2 if they cannot be compared, or
        too little of them to say.
    """
    try:
        given = _parser().parse_args(list(arguments))
    except SystemExit:  # argparse has printed the mistake
        return _USAGE_ERROR
    try:
        difference = compare(Run(given.a), Run(given.b), tolerance=given.tolerance)
    except Error as error:
        print(f"popsim diff: {error.message}", file=sys.stderr)
        return _USAGE_ERROR
    print(json.dumps(difference.as_dict(), indent=2) if given.json else difference)
    if difference.first is not None:
        return _DIFFERENT
    return _EQUAL if difference.equal else _TOO_LITTLE_COMPARED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="popsim diff", add_help=False)
    parser.add_argument("a", metavar="run_a")
    parser.add_argument("b", metavar="run_b")
    parser.add_argument("--tolerance", type=_tolerance, default=0.0, metavar="T")
    parser.add_argument("--json", action="store_true")
    return parser


def _tolerance(text: str) -> float:
    number = float(text)
    if not 0 <= number < math.inf:
        raise ValueError("a tolerance is not negative, and finite")
    return number
