"""Detects when other virtual machines take part of this machine's cores.

The system does not report this: the cores are present, but slower. So a matrix product by PyTorch,
which is no contender's code, is timed and compared with its fastest time in this process.
"""

from __future__ import annotations

import atexit
import time

import torch

TOLERANCE = 1.12
"""A product that takes longer than so many times the fastest one was disturbed."""
SEARCH_SECONDS = 6.0
"""For the first fastest time. A disturbance lasts for seconds."""
PAUSE_SECONDS = 0.25
PATIENCE_OF_ALL = 20.0
"""Seconds that all comparisons of a process wait together."""
PRODUCT_SIZE = 384


class Disturbance:
    """Waits for undisturbed moments, up to a number of seconds in total.

    Args:
        patience: Seconds to wait, or to spend on discarded rounds, before disturbed rounds are
            accepted. All comparisons of a process together have ``PATIENCE_OF_ALL``.
    """

    _fastest = float("inf")
    _left_of_all = PATIENCE_OF_ALL
    _num_repeated = 0
    _num_disturbed = 0

    def __init__(self, patience: float) -> None:
        self._left = patience
        if Disturbance._fastest == float("inf"):
            atexit.register(self._report)
            end = time.perf_counter() + SEARCH_SECONDS
            while time.perf_counter() < end:
                self._is_now()
                time.sleep(0.02)

    def wait(self) -> None:
        """Return at an undisturbed moment, or when the patience is used up."""
        while self._is_patient() and self._is_now():
            time.sleep(PAUSE_SECONDS)
            self._spend(PAUSE_SECONDS)

    def spoilt(self, seconds: float) -> bool:
        """Return whether a round that took this time must be measured again."""
        if not self._is_now():
            return False
        if not self._is_patient():
            Disturbance._num_disturbed += 1
            return False
        self._spend(seconds)
        Disturbance._num_repeated += 1
        return True

    def _is_patient(self) -> bool:
        return self._left > 0 and Disturbance._left_of_all > 0

    def _spend(self, seconds: float) -> None:
        self._left -= seconds
        Disturbance._left_of_all -= seconds

    @classmethod
    def _is_now(cls) -> bool:
        seconds = min(cls._product_seconds() for _ in range(3))
        cls._fastest = min(cls._fastest, seconds)
        return seconds > TOLERANCE * cls._fastest

    @staticmethod
    def _product_seconds() -> float:
        matrix = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE)
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        return time.perf_counter() - start

    @classmethod
    def _report(cls) -> None:
        print(
            f"\nDisturbed by other virtual machines: {cls._num_repeated} rounds were repeated, and "
            f"{cls._num_disturbed} disturbed rounds were used."
        )
