"""The simulated devices of this process, and which of them are in use.

There are 64 IPUs. As on a machine with real IPUs, a device is one IPU or a group of neighbouring
IPUs whose number is a power of two: devices 0 to 63 are the single IPUs, 64 to 95 the pairs, 96 to
111 the groups of four, and so on up to 126, which has all of them. Higher ids stand for further
machines of 64 IPUs each. An IPU belongs to one model at a time. The registry only keeps its number:
an IPU has no memory and no clock of its own.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

from popsim_torch import logs
from popsim_torch.errors import Error

__all__ = ["NUM_IPUS", "Device", "DeviceRegistry", "registry"]

NUM_IPUS = 64
_WAIT_VARIABLE = "POPTORCH_WAIT_FOR_IPU"
_RETRY_SECONDS = 15.0


class Device:
    """A device that one model holds until ``release`` is called or this object is deleted.

    Args:
        owner: The registry that the device comes from.
        device_id: Its number.
        ipus: The numbers of its IPUs.

    Attributes:
        id: Its number.
    """

    def __init__(self, owner: DeviceRegistry, device_id: int, ipus: range) -> None:
        self._owner = owner
        self._ipus = ipus
        self._held = True
        self.id = device_id

    @property
    def num_ipus(self) -> int:
        """How many IPUs it has (count)."""
        return len(self._ipus)

    def release(self) -> None:
        """Make the device free for other models; the second call does nothing."""
        self._owner._free(self)

    def __del__(self) -> None:
        self.release()


class DeviceRegistry:
    """Hands out devices.

    Args:
        num_ipus: How many IPUs there are (count), a power of two.
        retry_seconds: With ``POPTORCH_WAIT_FOR_IPU=1``, the longest wait (s) before the next
            attempt; a device that this process releases is noticed at once.
    """

    def __init__(self, num_ipus: int = NUM_IPUS, retry_seconds: float = _RETRY_SECONDS) -> None:
        self._num_ipus = num_ipus
        self._retry_seconds = retry_seconds
        self._busy: set[int] = set()
        # Reentrant: the garbage collector may release a device at any time, also inside these
        # methods.
        self._changed = threading.Condition(threading.RLock())

    def acquire(self, num_ipus: int, device_id: int | None = None) -> Device:
        """Return a free device: the requested one, or the lowest one with enough IPUs.

        With the environment variable ``POPTORCH_WAIT_FOR_IPU=1``, wait until a device is free.

        Args:
            num_ipus: How many IPUs the model needs (count).
            device_id: The device to take; None for any.

        Raises:
            Error: There is no such device, or none is free.
        """
        self._check(num_ipus, device_id)
        device = self._take(num_ipus, device_id)
        if device is None:
            gc.collect()  # an unreachable executor may still hold a device
            device = self._take(num_ipus, device_id)
        while device is None:
            if os.environ.get(_WAIT_VARIABLE) != "1":
                raise self._none_free(num_ipus, device_id)
            logs.trace("No IPU available, sleeping for %g seconds", self._retry_seconds)
            with self._changed:
                device = self._take(num_ipus, device_id)
                if device is None:
                    self._changed.wait(self._retry_seconds)
            device = device or self._take(num_ipus, device_id)
        return device

    def lowest_match(self, num_ipus: int, device_id: int | None = None) -> int:
        """Return the device that ``acquire`` would return if no device was in use.

        Args:
            num_ipus: How many IPUs the model needs (count).
            device_id: The device to take; None for any.

        Raises:
            Error: There is no such device.
        """
        self._check(num_ipus, device_id)
        return next(self._candidates(num_ipus, device_id))

    def _check(self, num_ipus: int, device_id: int | None) -> None:
        if num_ipus > self._num_ipus:
            raise Error(
                f"Failed to acquire {num_ipus} IPU(s): the machine has {self._num_ipus}. Place the "
                "model on fewer IPUs, or use fewer replicas."
            )
        if device_id is None:
            return
        if device_id < 0:
            raise Error(f"Failed to acquire device {device_id}: ids begin at 0.")
        available = len(self._ipus(device_id))
        if available < num_ipus:
            lowest = next(self._candidates(num_ipus, None))
            raise Error(
                f"Failed to acquire device {device_id}: it has {available} IPU(s), and the model "
                f"needs {num_ipus}. Devices from {lowest} on have enough; without "
                "Options.useIpuId the lowest free device is used."
            )

    def _none_free(self, num_ipus: int, device_id: int | None) -> Error:
        what = f"{num_ipus} IPU(s)" if device_id is None else f"device {device_id}"
        return Error(
            f"Failed to acquire {what}: in use by other models of this process. Call "
            "detachFromDevice() or destroy() on one of them, or delete it, and try again. With "
            f"{_WAIT_VARIABLE}=1 in the environment, the call waits until a device is free."
        )

    def _candidates(self, num_ipus: int, device_id: int | None) -> Iterator[int]:
        if device_id is not None:
            yield device_id
            return
        for candidate in range(2 * self._num_ipus - 1):
            if len(self._ipus(candidate)) >= num_ipus:
                yield candidate

    def _take(self, num_ipus: int, device_id: int | None) -> Device | None:
        with self._changed:
            for candidate in self._candidates(num_ipus, device_id):
                ipus = self._ipus(candidate)
                if self._busy.isdisjoint(ipus):
                    self._busy.update(ipus)
                    return Device(self, candidate, ipus)
        return None

    def _free(self, device: Device) -> None:
        with self._changed:
            if device._held:
                device._held = False
                self._busy.difference_update(device._ipus)
                self._changed.notify_all()

    def _ipus(self, device_id: int) -> range:
        """Return the numbers of a device's IPUs."""
        position, size = device_id, 1
        while size <= self._num_ipus:
            num_devices = self._num_ipus // size
            if position < num_devices:
                return range(position * size, (position + 1) * size)
            position -= num_devices
            size *= 2
        first = (1 + position) * self._num_ipus
        return range(first, first + self._num_ipus)


registry = DeviceRegistry()
"""The devices of this process."""
