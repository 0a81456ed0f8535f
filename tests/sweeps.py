"""Which part of a sweep runs in every ``make test``; ``make slow`` runs the rest."""

import itertools
from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Return the values of one parameter of a test, of which those not in ``quick`` are slow."""
    return [v if v in quick else pytest.param(v, marks=pytest.mark.slow) for v in values]


def combined(*axes: Iterable[Any], quick: Callable[..., bool]) -> list[Any]:
    """Return all combinations of values of several parameters of a test.

    Args:
        axes: The values of each parameter.
        quick: Called with a combination: whether it runs in every ``make test``.
    """
    return [
        pytest.param(
            *values,
            marks=() if quick(*values) else pytest.mark.slow,
            id="-".join(str(getattr(value, "__name__", value)) for value in values),
        )
        for values in itertools.product(*axes)
    ]


def one_by_one(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations of values; quick ones have the first value on all axes but one."""
    axes = tuple(map(list, axes))
    firsts = [axis[0] for axis in axes]

    def is_quick(*values: Any) -> bool:
        return sum(v is not first for v, first in zip(values, firsts, strict=True)) < 2

    return combined(*axes, quick=is_quick)
