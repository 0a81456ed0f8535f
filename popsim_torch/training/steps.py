"""Chooses the number of steps in an epoch, and in each run of the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from popsim_torch.errors import UsageValueError

__all__ = ["FROM_OPTIONS", "Steps", "plan_steps"]

FROM_OPTIONS = "options.Training.gradientAccumulation"


@dataclass(frozen=True)
class Steps:
    """The steps of an epoch.

    Attributes:
        per_epoch: The number of micro-batches in an epoch.
        per_execution: The number of micro-batches in one run of the device; divides ``per_epoch``.
    """

    per_epoch: int
    per_execution: int

    @property
    def executions(self) -> int:
        """The number of runs of the device in an epoch."""
        return self.per_epoch // self.per_execution


def plan_steps(
    function: str,
    num_batches: int | None,
    per_epoch: int | None,
    per_execution: int | None,
    *,
    accumulation: int = 1,
    accumulation_from: str = FROM_OPTIONS,
    device_iterations: int = 1,
    epoch_name: str = "steps_per_epoch",
    data_name: str = "the data",
) -> Steps:
    """Choose the counts that were not given, and check that no counts contradict each other.

    Args:
        function: The name of the caller, for messages.
        num_batches: The number of micro-batches in the data; None if it is unknown.
        per_epoch: As given.
        per_execution: As given; None for ``device_iterations`` weight updates if that is not 1,
            otherwise for the whole epoch.
        accumulation: The number of micro-batches per weight update.
        accumulation_from: Where that number was set, for messages.
        device_iterations: The device iterations of the options (count).
        epoch_name: The function's name for ``per_epoch``.
        data_name: The function's name for the data.

    Raises:
        UsageValueError: A count is not a positive integer, or is not a multiple of another count.
    """
    _check_count(function, epoch_name, per_epoch)
    _check_count(function, "steps_per_execution", per_execution)
    origin = ""
    if per_epoch is None:
        if num_batches is None:
            raise UsageValueError(
                f"{function}: {data_name} does not say how many batches it has. Pass {epoch_name}."
            )
        if num_batches == 0:
            raise UsageValueError(
                f"{function}: {data_name} has no batch. A loader with drop_last=True has none if "
                "the dataset is smaller than one batch."
            )
        per_epoch, origin = num_batches, f" (the batches of {data_name})"
    if per_execution is None and device_iterations == 1:
        per_execution = per_epoch
        if per_epoch % accumulation:
            raise UsageValueError(
                f"{function}: {epoch_name} = {per_epoch}{origin} is not a multiple of the "
                f"gradient accumulation of {accumulation} "
                f"({accumulation_from}). {_nearest(per_epoch, accumulation)}"
            )
    elif per_execution is None:
        per_execution = device_iterations * accumulation
    elif device_iterations not in (1, per_execution // accumulation):
        raise UsageValueError(
            f"{function}: steps_per_execution = {per_execution}, and the options ask for "
            f"{device_iterations} device iterations of {accumulation} micro-batches each, which "
            f"is {device_iterations * accumulation}. Leave one of the two out."
        )
    if per_execution % accumulation:
        raise UsageValueError(
            f"{function}: steps_per_execution = {per_execution} is not a multiple of the gradient "
            f"accumulation of {accumulation} ({accumulation_from}). "
            f"{_nearest(per_execution, accumulation)}"
        )
    if per_epoch % per_execution:
        raise UsageValueError(
            f"{function}: {epoch_name} = {per_epoch}{origin} is not a multiple of "
            f"steps_per_execution = {per_execution}. {_nearest(per_epoch, per_execution)} "
            f"{_divisors_near(per_epoch, per_execution, accumulation)}"
        )
    return Steps(per_epoch, per_execution)


def _check_count(function: str, name: str, count: object) -> None:
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise UsageValueError(f"{function}: {name} must be an integer of 1 or more, got {count!r}.")


def _nearest(count: int, divisor: int) -> str:
    lower = count - count % divisor
    if lower == 0:
        return f"The smallest multiple is {divisor}."
    return f"The nearest multiples are {lower} and {lower + divisor}."


def _divisors_near(per_epoch: int, per_execution: int, accumulation: int) -> str:
    """Return the values of ``steps_per_execution`` that fit an epoch, as a sentence."""
    valid = [n for n in _divisors(per_epoch) if n % accumulation == 0]
    below = [n for n in valid if n < per_execution][-1:]
    above = [n for n in valid if n > per_execution][:1]
    if not below + above:
        return f"No steps_per_execution fits {per_epoch} steps."
    found = " or ".join(str(n) for n in below + above)
    return f"For {per_epoch}, the nearest steps_per_execution is {found}."


def _divisors(number: int) -> Iterable[int]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
