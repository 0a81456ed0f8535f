"""The state of an executor's random numbers."""

from __future__ import annotations

import operator

import torch

from popsim_torch import _native, logs
from popsim_torch.errors import Error
from popsim_torch.executor.device_program import DeviceProgram

__all__ = ["MAX_SEED", "RandomState"]

MAX_SEED = 2**64 - 1
_MAX_STEP = 2**63 - 1


class RandomState:
    """The part of an executor that holds the state of its random numbers.

    Args:
        device: The executor's program.
        start: The first seed and step of the next program, in the form of ``rng_state``.

    Attributes:
        start: See above.
    """

    def __init__(self, device: DeviceProgram, start: list[int]) -> None:
        self._device = device
        self.start = start

    @property
    def rng_state(self) -> list[int]:
        """The seed and the number of micro-batches run, which determine the random numbers.

        Raises:
            Error: The model is not compiled, or runs in another thread. Reading and writing both
                raise this error.
        """
        executable = self._device.require_compiled("rng_state").executable
        with _native.translated_errors():
            return [executable.seed, executable.step]

    @rng_state.setter
    def rng_state(self, state: list[int]) -> None:
        executable = self._device.require_compiled("rng_state").executable
        try:
            numbers = [operator.index(number) for number in state]
        except (TypeError, ValueError):
            numbers = []
        limits = (MAX_SEED, _MAX_STEP)
        if len(numbers) != 2 or not all(
            0 <= number <= limit for number, limit in zip(numbers, limits, strict=True)
        ):
            raise Error(
                f"rng_state: needs [seed, step] as read from it, two ints from 0 to {MAX_SEED} "
                f"and {_MAX_STEP}; got {state!r}."
            )
        with _native.translated_errors():
            executable.seed, executable.step = numbers
        device = self._device.state
        if device is not None and device.exchange is not None:
            parts = [number >> shift & 0xFFFFFFFF for number in numbers for shift in (0, 32)]
            device.exchange.note({"rng_state": torch.tensor(parts, device="cpu")})

    def log(self, *, leaving: bool) -> None:
        """Log the parts of the state that go to the device or come from it."""
        compiled = self._device.compiled
        assert compiled is not None
        with _native.translated_errors():  # also refuses while another thread is in a call
            has_run = compiled.executable.step > 0
        if leaving:
            if has_run:
                logs.backend.debug("Reading random seed")
                logs.backend.debug("Reading RNG state")
            return
        options = self._device.options
        if options.exists("random_seed"):
            logs.backend.debug("Setting random seed to: %d", options.random_seed)
        if has_run:
            logs.backend.debug("Setting RNG state")
