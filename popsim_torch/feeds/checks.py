"""Checks of both kinds of queues: of their arguments, and of the process that uses them."""

from __future__ import annotations

import math
import os

from popsim_torch.errors import Error

__all__ = ["OneProcess", "check_integer", "check_placement", "check_seconds"]


def check_integer(where: str, name: str, value: object, least: int, most: int | None = None) -> int:
    """Return an integer if it is in its bounds, or raise an Error that names the value."""
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < least
        or (most is not None and value > most)
    ):
        bounds = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise Error(f"{where}: {name} must be an integer {bounds}, got {value!r}.")
    return value


def check_seconds(where: str, name: str, value: object) -> float:
    """Return a time in seconds, or raise an Error that names the value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise Error(f"{where}: {name} must be a number of seconds above 0, got {value!r}.")
    return float(value)


def check_placement(where: str, device_ordinal: object, optimise_latency: object) -> None:
    """Check the arguments that choose how real hardware moves elements."""
    if device_ordinal is not None:
        check_integer(where, "device_ordinal", device_ordinal, 0)
    if not isinstance(optimise_latency, bool):
        raise Error(f"{where}: optimise_latency must be True or False, got {optimise_latency!r}.")


class OneProcess:
    """Limits a queue to the process that made it: its threads and locks do not survive a fork."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._id = os.getpid()

    def check(self) -> None:
        """Raise an Error in any other process."""
        if os.getpid() != self._id:
            raise Error(
                f"{self._where}: the queue was made in process {self._id}, and this is process "
                f"{os.getpid()}. Queues are not shared between processes: make one in the process "
                "that runs the program."
            )
