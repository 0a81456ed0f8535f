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


def diff(arguments: Sequence[str]) -> int:
    """Compare two runs, and print where they first differ.

    Args:
        arguments: The arguments of the command line after ``diff``.

    Returns:
        The exit code: 0 if the runs are equal, 1 if they differ, 2 if they cannot be compared.
    """
    try:
        given = _parser().parse_args(list(arguments))
    except SystemExit as end:  # argparse has printed the help, or the mistake
        return int(end.code or 0)
    try:
        difference = compare(Run(given.a), Run(given.b), tolerance=given.tolerance)
    except Error as error:
        print(f"popsim diff: {error.message}", file=sys.stderr)
        return _USAGE_ERROR
    print(json.dumps(difference.as_dict(), indent=2) if given.json else difference)
    return _EQUAL if difference.equal else _DIFFERENT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="popsim diff",
        description="Say where two runs first differ, and how the difference grows.",
        epilog="The exit code is 0 if the runs are equal, 1 if they differ, 2 for a mistake.",
    )
    parser.add_argument("a", help="the folder of a run")
    parser.add_argument("b", help="the folder of the run to compare with")
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        default=0.0,
        metavar="T",
        help="values may differ by T, relative; 0 compares bits",
    )
    parser.add_argument("--json", action="store_true", help="print the difference as JSON")
    return parser


def _tolerance(text: str) -> float:
    number = float(text)
    if not 0 <= number < math.inf:
        raise ValueError("a tolerance is not negative, and finite")
    return number
