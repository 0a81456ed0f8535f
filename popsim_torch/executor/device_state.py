"""Weights, optimizer state and hyper-parameters: between the host's tensors and the device's."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import nn

from popsim_torch import _native
from popsim_torch.executor import host_weights
from popsim_torch.executor.compile import CompiledModel
from popsim_torch.optim.plan import OptimizerPlan

_logger = logging.getLogger("poptorch::python")


class DeviceState:
    """What a compiled model keeps between runs; also an optimizer's ``DeviceLink``.

    Args:
        module: The module whose parameters and buffers are the host's side.
        compiled: The program whose variables are the device's side.
    """

    def __init__(self, module: nn.Module, compiled: CompiledModel) -> None:
        self._module = module
        self._executable = compiled.executable
        self._program = compiled.program
        self._plan = compiled.plan

    @property
    def plan(self) -> OptimizerPlan | None:
        """The optimizer's updates, with the values that the device has now."""
        return self._plan

    def upload_weights(self) -> None:
        """Copy parameters and floating-point buffers to the device."""
        _logger.info("Writing weights from host to IPU memory")
        with host_weights.without_sync(), torch.no_grad(), _native.translated_errors():
            for _, host, tensor in self._weights():
                self._executable.write(tensor, host_weights.plain(host))

    def download_weights(self) -> None:
        """Copy the parameters and buffers that the program changes into the host's tensors.

        Others are the host's: another executor may train them.
        """
        _logger.info("Writing weights from IPU to host")
        updates = () if self._plan is None else self._plan.updates
        changed = {update.parameter for update in updates} | set(self._program.changed_buffers)
        with host_weights.without_sync(), torch.no_grad():
            for name, host, tensor in self._weights():
                if name in changed:
                    host_weights.plain(host).copy_(self._executable.read(tensor))

    def initialise_optimizer(self) -> None:
        """Give states and hyper-parameters the values they have before the first update."""
        if self._plan is None:
            return
        for name, scalar in self._plan.scalars().items():
            if name in self._program.scalars:
                self._write_scalar(name, scalar.value)
        parameters = dict(self._module.named_parameters())
        with host_weights.without_sync():
            for update in self._plan.updates:
                weight = host_weights.plain(parameters[update.parameter])
                for state in update.all_states:
                    value = state.initial_value(weight)
                    self._executable.write(self._program.states[state.name], value)

    def replace_plan(self, plan: OptimizerPlan) -> None:
        """Go on with other values of the same structure.

        Raises:
            Error: The new plan would need another program.
        """
        assert self._plan is not None
        self._plan.check_replaceable(plan)
        for name, ratio in self._plan.state_ratios(plan).items():
            tensor = self._program.states[name]
            self._executable.write(tensor, self._executable.read(tensor) * ratio)
        for scalar in self._plan.changed_scalars(plan):
            self._write_scalar(scalar.name, scalar.value)
        self._plan = plan

    # DeviceLink

    def read_state(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's saved states by name."""
        assert self._plan is not None
        return {
            name: self._executable.read(self._program.states[name])
            for name in self._plan.saved_states()
        }

    def read_parameters(self) -> dict[str, torch.Tensor]:
        """Return the variable hyper-parameters by name, in their derived form."""
        assert self._plan is not None
        return {
            name: self._executable.read(self._program.scalars[name])
            for name in self._plan.variable_scalars()
            if name in self._program.scalars
        }

    def write_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take states and hyper-parameters over; names the program does not have are ignored."""
        assert self._plan is not None
        missing = [name for name in self._plan.saved_states() if name not in tensors]
        if missing:
            _logger.warning(
                "The optimizer state has no value for %s; the device keeps its own.", missing
            )
        known = {**self._program.states, **self._program.scalars}
        with _native.translated_errors():
            for name, value in tensors.items():
                if name in known:
                    self._executable.write(known[name], value)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor, int]]:
        parameters = dict(self._module.named_parameters())
        buffers = dict(self._module.named_buffers())
        for name, tensor in self._program.parameters.items():
            yield name, parameters[name], tensor
        for name, tensor in self._program.buffers.items():
            yield name, buffers[name], tensor

    def _write_scalar(self, name: str, value: float) -> None:
        self._executable.write(self._program.scalars[name], torch.tensor(value))
