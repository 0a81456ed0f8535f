"""How the device adapts the loss scale to the size of the gradients."""

from __future__ import annotations

from dataclasses import dataclass

_LARGEST_HALF = 65504.0


@dataclass(frozen=True)
class LossScaleRule:
    """Halves the loss scale when gradients are about to overflow, and doubles it otherwise.

    The scale of the backward pass is the optimizer's times a factor, which begins at 1. In each
    update the elements of the parameters' gradients are counted, of all its micro-batches; after
    every ``period`` updates the factor changes.

    Attributes:
        edge: Elements whose magnitude is above this, and those that are NaN, count as too large;
            a share of 65504, the largest number of float16.
        share: The factor is halved if the share of such elements is above this, else doubled.
        micro_batches: Of an update.
        period: Updates from one change of the factor to the next.
        largest_scale: The factor is not doubled where optimizer's scale times factor would come
            to more.
        least_factor: The factor is not halved below this.
    """

    edge: float = 0.125
    share: float = 1e-7
    period: int = 1
    micro_batches: int = 1
    largest_scale: float = 2.0**15
    least_factor: float = 2.0**-24

    @property
    def threshold(self) -> float:
        """The magnitude above which an element is too large."""
        return self.edge * _LARGEST_HALF
