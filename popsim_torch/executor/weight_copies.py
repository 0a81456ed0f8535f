"""The copies of weights between host and device that a program can ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from popsim_torch import optim
from popsim_torch.errors import Error
from popsim_torch.executor.base import ExecutorBase
from popsim_torch.trace.cumulative_norm import lasting_counters

__all__ = ["WeightCopies"]


class WeightCopies(ExecutorBase):
    """The part of an executor that copies weights.

    While the executor is detached there is nothing to copy: the host got what the device had, and
    attaching uploads what the host has by then. The calls then do nothing.
    """

    def copyWeightsToHost(self) -> None:
        """Copy the parameters and buffers that the device changes into the host's tensors.

        Raises:
            Error: The model is not compiled.
        """
        self._require_compiled("copyWeightsToHost")
        if self._connection.attached:
            self._weights.download()

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy the weights to the host if the device has newer ones; return whether it did."""
        return self._weights.fetch()

    def copyWeightsToDevice(self) -> None:
        """Copy the host's parameters and floating-point buffers to the device.

        Training progress on the device that was not copied to the host is lost, but for the
        optimizer's state, which the optimizer reads first.

        Raises:
            Error: The model is not compiled.
        """
        self._require_compiled("copyWeightsToDevice")
        if not self._connection.attached:
            return
        if isinstance(self._optimizer, optim.Optimizer):
            self._optimizer._read_back()
        self._weights.upload()

    def copyNamedBuffersToDevice(self) -> None:
        """Copy the buffers of ``Options.updatableNamedBuffers`` to the device, and nothing else.

        Raises:
            Error: The model is not compiled, or the option does not name any.
        """
        self._require_compiled("copyNamedBuffersToDevice")
        names = self._updatable_buffers()
        if not names:
            raise Error(
                "copyNamedBuffersToDevice: no buffers are named. Call "
                "Options.updatableNamedBuffers([...]) with their names before the model is wrapped."
            )
        if self._connection.attached:
            assert self._state is not None
            self._state.upload_buffers(names)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a state dictionary into the user's model, and upload it if the model is attached.

        Returns:
            Torch's tuple of missing and unexpected keys.
        """
        result = self._user_model.load_state_dict(state_dict, strict=strict)
        if self._compiled is not None:
            self.copyWeightsToDevice()
        return result

    def _updatable_buffers(self) -> list[str]:
        names: list[str] = self._options._Popart.options.get("updatableNamedBuffers") or []
        return names

    def _check_updatable_buffers(self) -> None:
        """Refuse names of ``Options.updatableNamedBuffers`` that cannot be uploaded.

        Raises:
            Error: The model has no such buffer, or it is a constant of the program.
        """
        buffers = dict(self._traced_model.named_buffers(remove_duplicate=False))
        counters = lasting_counters(self._traced_model, buffers)
        for name in self._updatable_buffers():
            if name not in buffers:
                raise Error(
                    f"Options.updatableNamedBuffers: the model has no buffer '{name}'. It has "
                    f"{', '.join(sorted(buffers)) or 'none'}."
                )
            if not buffers[name].is_floating_point() and name not in counters:
                raise Error(
                    f"Options.updatableNamedBuffers: the buffer '{name}' of type "
                    f"{buffers[name].dtype} is a constant of the compiled model, as all buffers "
                    "are that are not floating-point. Make it one, or leave it out."
                )
