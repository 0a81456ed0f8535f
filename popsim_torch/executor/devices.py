"""The simulated devices of this process, and which of them are in use.

There are 64 IPUs. As on a machine that has them, a device is an IPU or a group of neighbours whose
number is a power of two: devices 0 to 63 are the IPUs, 64 to 95 the pairs, 96 to 111 the groups of
four, and so on up to 126, which is all of them. Ids beyond stand for further machines of 64 IPUs
each. An IPU belongs to one model at a time; to the registry it is a name, and has no memory or
time of its own.
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
    """A device that one model has to itself until it is released, or nobody holds this object.

    Args:
        owner: The registry it comes from.
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
        """Let others have the device; does nothing the second time."""
        self._owner._free(self)

    def __del__(self) -> None:
        self.release()


class DeviceRegistry:
    """Gives devices out.

    Args:
        num_ipus: How many IPUs there are (count), a power of two.
        retry_seconds: With ``POPTORCH_WAIT_FOR_IPU=1``, how long to wait at most before the next
            attempt; a device that this process releases is noticed at once.
    """

    def __init__(self, num_ipus: int = NUM_IPUS, retry_seconds: float = _RETRY_SECONDS) -> None:
        self._num_ipus = num_ipus
        self._retry_seconds = retry_seconds
        self._busy: set[int] = set()
        # Reentrant: the garbage collector may release a device at any time, here as well.
        self._changed = threading.Condition(threading.RLock())

    def acquire(self, num_ipus: int, device_id: int | None = None) -> Device:
        """Return a free device: the one asked for, or the lowest one with enough IPUs.

        With the environment variable ``POPTORCH_WAIT_FOR_IPU=1`` it waits until there is one.

        Args:
            num_ipus: How many IPUs the model needs (count).
            device_id: The device to take; None for any.

        Raises:
            Error: There is none, or none is free.
        """
        self._check(num_ipus, device_id)
        device = self._take(num_ipus, device_id)
        if device is None:
            gc.collect()  # what nobody can reach any more may still hold one
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
        """Return the device that ``acquire`` would take if none was in use.

        Args:
            num_ipus: How many IPUs the model needs (count).
            device_id: The device to take; None for any.

        Raises:
            Error: There is none.
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
                f"needs {num_ipus}. Devices from {lowest} on have as many; without "
                "Options.useIpuId the lowest free one is taken."
            )

    def _none_free(self, num_ipus: int, device_id: int | None) -> Error:
        what = f"{num_ipus} IPU(s)" if device_id is None else f"device {device_id}"
        return Error(
            f"Failed to acquire {what}: in use by other models of this process. Call "
            "detachFromDevice() or destroy() on one of them, or drop it, and try again; with "
            f"{_WAIT_VARIABLE}=1 in the environment the call waits until that has happened."
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
        """Return the IPUs of a device."""
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
