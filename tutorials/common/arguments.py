"""Types of command line arguments, for all tutorial scripts."""

import argparse
import math


def count(text: str) -> int:
    """Return an integer of 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"needs 1 or more, got {text}")
    return number


def positive(text: str) -> float:
    """Return a finite number above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"needs a number above 0, got {text}")
    return number
