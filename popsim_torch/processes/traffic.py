"""``Traffic``: what a model has exchanged with other processes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Traffic"]


@dataclass(frozen=True)
class Traffic:
    """What a training model has exchanged with the other processes that train it.

    Attributes:
        exchanges: Number of exchanges of gradients: one for each weight update.
        bytes: Bytes of gradients that this process has sent.
        seconds: The time that the exchanges took, with the time of waiting for other processes.
    """

    exchanges: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.exchanges} exchanges of gradients, {self.bytes} bytes sent, "
            f"{self.seconds:.3f} s"
        )
