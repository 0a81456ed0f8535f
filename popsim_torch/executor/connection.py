"""An executor's connection to a device: when it attaches and detaches, with log messages."""

from __future__ import annotations

from popsim_torch import logs
from popsim_torch.enums import ConnectionType
from popsim_torch.errors import Error, UsageAssertionError
from popsim_torch.executor.devices import Device, DeviceRegistry, registry
from popsim_torch.options import Options

__all__ = ["Connection"]


class Connection:
    """The device that an executor holds, if any.

    A model that computes nothing on a device attaches without a device.

    Args:
        options: Say when to attach, and to which device.
        devices: The registry that hands out devices; None for the registry of this process.

    Attributes:
        attached: Whether the model is on its device.
    """

    def __init__(self, options: Options, devices: DeviceRegistry | None = None) -> None:
        self._type = ConnectionType(options.connection_type)
        self._wanted: int | None = options.ipu_id if options.exists("ipu_id") else None
        self._devices = devices or registry
        self._device: Device | None = None
        self.attached = False

    @property
    def offline(self) -> bool:
        """Whether the model is compiled for a machine without a device."""
        return self._type == ConnectionType.Never

    def check_settings(self, options: Options) -> None:
        """Refuse settings that need a device, if the model is compiled for an offline target.

        Args:
            options: The options of the executor.

        Raises:
            Error: ``useOfflineIpuTarget`` is set together with such a setting.
        """
        if not options.exists("ipu_version"):
            return
        counts = options._Popart.options.get("instrumentWithHardwareCycleCounter", False)
        other = "useIpuId" if self._wanted is not None else "logCycleCount(True)" if counts else ""
        if other:
            raise Error(
                f"Options.useOfflineIpuTarget and Options.{other} are both set, but an offline "
                "target has no device to choose. Remove one of them."
            )

    def check_online(self, what: str) -> None:
        """Refuse an operation that needs a device, if there is none.

        Raises:
            UsageAssertionError: The model never attaches.
        """
        if self.offline:
            raise UsageAssertionError(
                f"Trying to {what} on an offline device (ConnectionType.Never). Remove "
                "Options.connectionType or Options.useOfflineIpuTarget, or load the exported "
                "executable where there is a device."
            )

    def attach_compiled(self, num_ipus: int) -> None:
        """Attach a model that has just been compiled, unless it never does.

        Args:
            num_ipus: How many IPUs it needs (count); 0 for a model without work for an IPU.

        Raises:
            Error: No device is free.
        """
        if self._type == ConnectionType.OnDemand and num_ipus:
            _log_acquired(num_ipus, self._devices.lowest_match(num_ipus, self._wanted))
        if self._type == ConnectionType.Always:
            self.attach(num_ipus)
        logs.trace("Finished Poplar compilation")
        if self._type == ConnectionType.OnDemand:
            self._take(num_ipus, log_acquired=False)

    def attach(self, num_ipus: int) -> None:
        """Take a device.

        Args:
            num_ipus: How many IPUs the model needs (count); 0 for a model without work for an IPU.

        Raises:
            Error: No device is free.
        """
        self._take(num_ipus, log_acquired=True)

    def detach(self) -> None:
        """Release the device; do nothing if there is none."""
        self.attached = False
        device, self._device = self._device, None
        if device is not None:
            device.release()
            logs.backend.debug("Detached from device %d", device.id)

    def _take(self, num_ipus: int, *, log_acquired: bool) -> None:
        if num_ipus:
            self._device = self._devices.acquire(num_ipus, self._wanted)
            if log_acquired:
                _log_acquired(self._device.num_ipus, self._device.id)
            logs.trace("Attached to device %d", self._device.id)
        self.attached = True


def _log_acquired(num_ipus: int, device_id: int) -> None:
    logs.backend.debug("Acquired %d IPU(s): running on device Id %d", num_ipus, device_id)
