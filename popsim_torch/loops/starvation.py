"""Says when a loop spends its time on waiting for data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

from popsim_torch import logs

__all__ = ["Starvation"]

LEAST_SECONDS = 1.0
"""A shorter wait, over all runs of a program, is not worth a line."""
LEAST_SHARE = 0.25
"""Nor is a smaller share of the time that it ran."""

_NOTHING = nullcontext()


class Starvation:
    """Adds up how long a program ran and waited, and warns once.

    Args:
        infeeds: Where the program's data comes from.
    """

    def __init__(self, infeeds: Sequence[Any]) -> None:
        self._infeeds = infeeds
        self._ran = self._waited = 0.0
        self._warned = False

    def watched(self) -> AbstractContextManager[None]:
        """Return a scope in which the program runs, which counts."""
        return self._counted() if self._infeeds and not self._warned else _NOTHING

    @contextmanager
    def _counted(self) -> Iterator[None]:
        before, start = self._seconds_waited(), perf_counter()
        yield
        self._ran += perf_counter() - start
        self._waited += self._seconds_waited() - before
        if self._waited >= LEAST_SECONDS and self._waited >= LEAST_SHARE * self._ran:
            self._warned = True
            logs.python.warning(
                "A loop waited for data in %.1f of the %.1f seconds that it ran: the data "
                "pipeline, not the device, is the limit. Prepare data in more processes "
                "(DataLoader(num_workers=...)) or once and for all; poptorch.dataset_benchmark "
                "measures how fast it is.",
                self._waited,
                self._ran,
            )

    def _seconds_waited(self) -> float:
        waited: float = sum(infeed.statistics()["seconds_waited"] for infeed in self._infeeds)
        return waited
