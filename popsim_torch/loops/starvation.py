"""Warns when a loop spends much of its time waiting for data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

from popsim_torch import logs

__all__ = ["Starvation"]

LEAST_SECONDS = 1.0
"""The shortest wait over all runs of a program (s) that is worth a warning."""
LEAST_SHARE = 0.25
"""The smallest share of the running time that is worth a warning."""

_NOTHING = nullcontext()


class Starvation:
    """Adds up how long a program ran and how long it waited, and warns once.

    Args:
        infeeds: The queues with the program's data.
    """

    def __init__(self, infeeds: Sequence[Any]) -> None:
        self._infeeds = infeeds
        self._ran = self._waited = 0.0
        self._warned = False

    def watched(self) -> AbstractContextManager[None]:
        """Return a scope that measures a run of the program."""
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
                "pipeline, not the device, is the limit. Prepare the data in more processes "
                "(DataLoader(num_workers=...)) or once in advance; poptorch.dataset_benchmark "
                "measures the speed of the data pipeline.",
                self._waited,
                self._ran,
            )

    def _seconds_waited(self) -> float:
        waited: float = sum(infeed.statistics()["seconds_waited"] for infeed in self._infeeds)
        return waited
