"""The copies of weights between host and device that a user's program can ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from popsim_torch.dtypes import is_continuous
from popsim_torch.errors import Error
from popsim_torch.executor.device_program import DeviceProgram
from popsim_torch.executor.optimizer_use import OptimizerUse
from popsim_torch.trace.cumulative_norm import lasting_counters

__all__ = ["WeightCopies"]


class WeightCopies:
    """The part of an executor that copies weights.

    While the executor is detached, the methods copy nothing: detaching has copied the weights to
    the host, and attaching will upload the host's weights.

    Args:
        device: The executor's program.
        optimizer: The part that holds the executor's optimizer.
        model: The user's model.
    """

    def __init__(self, device: DeviceProgram, optimizer: OptimizerUse, model: nn.Module) -> None:
        self._device = device
        self._optimizer = optimizer
        self._model = model

    def copyWeightsToHost(self) -> None:
        """Copy the parameters and buffers that the device changes into the host's tensors.

        Raises:
            Error: The model is not compiled.
        """
        self._device.require_compiled("copyWeightsToHost")
        if self._device.connection.attached:
            self._device.weights.download()

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy the weights to the host if the device has newer ones; return whether it did."""
        return self._device.weights.fetch()

    def copyWeightsToDevice(self) -> None:
        """Copy the host's parameters and floating-point buffers to the device.

        Training progress on the device that was not copied to the host is lost. The state of the
        optimizer is not lost: the optimizer reads it first.

        Raises:
            Error: The model is not compiled.
        """
        self._device.require_compiled("copyWeightsToDevice")
        if not self._device.connection.attached:
            return
        self._optimizer.read_back()
        self._device.weights.upload()

    def copyNamedBuffersToDevice(self) -> None:
        """Copy the buffers of ``Options.updatableNamedBuffers`` to the device, and nothing else.

        Raises:
            Error: The model is not compiled, or the option names no buffers.
        """
        self._device.require_compiled("copyNamedBuffersToDevice")
        names = self._updatable_buffers()
        if not names:
            raise Error(
                "copyNamedBuffersToDevice: no buffers are named. Call "
                "Options.updatableNamedBuffers([...]) with their names before the model is wrapped."
            )
        if self._device.connection.attached:
            assert self._device.state is not None
            self._device.state.upload_buffers(names)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a state dictionary into the user's model; upload the weights if it is attached.

        Returns:
            PyTorch's named tuple of missing and unexpected keys.
        """
        result = self._model.load_state_dict(state_dict, strict=strict)
        if self._device.compiled is not None:
            self.copyWeightsToDevice()
        return result

    def _updatable_buffers(self) -> list[str]:
        named = self._device.options._Popart.options.get("updatableNamedBuffers")
        return list(named or [])

    def check_updatable_buffers(self) -> None:
        """Refuse names of ``Options.updatableNamedBuffers`` that cannot be uploaded.

        Raises:
            Error: The model has no such buffer, or the buffer is a constant of the program.
        """
        module = self._device.module
        buffers = dict(module.named_buffers(remove_duplicate=False))
        counters = lasting_counters(module, buffers)
        for name in self._updatable_buffers():
            if name not in buffers:
                raise Error(
                    f"Options.updatableNamedBuffers: the model has no buffer '{name}'. It has "
                    f"{', '.join(sorted(buffers)) or 'none'}."
                )
            if not is_continuous(buffers[name].dtype) and name not in counters:
                raise Error(
                    f"Options.updatableNamedBuffers: the buffer '{name}' of dtype "
                    f"{buffers[name].dtype} is a constant of the compiled model, because it is not "
                    "floating-point. Convert it to a floating-point dtype, or leave it out."
                )
