"""Weights, optimizer state and hyper-parameters: between the host's tensors and the device's."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import nn

from popsim_torch import _native
from popsim_torch.errors import Error
from popsim_torch.executor import host_weights
from popsim_torch.executor.compile import CompiledModel
from popsim_torch.executor.host_tensors import HostTensors
from popsim_torch.optim.plan import OptimizerPlan

_logger = logging.getLogger("poptorch::python")


class DeviceState:
    """What a compiled model keeps between runs; also an optimizer's ``DeviceLink``.

    Args:
        module: The module whose parameters and buffers are the host's side.
        compiled: The program whose variables are the device's side.
    """

    def __init__(self, module: nn.Module, compiled: CompiledModel) -> None:
        self._executable = compiled.executable
        self._program = compiled.program
        self._plan = compiled.plan
        self._variables = {**compiled.program.parameters, **compiled.program.buffers}
        tensors = compiled.program.graph.tensors
        shapes = {name: tensors[variable].shape for name, variable in self._variables.items()}
        self._host = HostTensors(module, shapes)

    @property
    def plan(self) -> OptimizerPlan | None:
        """The optimizer's updates, with the values that the device has now."""
        return self._plan

    def upload_weights(self) -> None:
        """Copy parameters and floating-point buffers to the device.

        Raises:
            Error: They are not those that the model was compiled with; nothing is copied.
        """
        _logger.info("Writing weights from host to IPU memory")
        with host_weights.without_sync(), torch.no_grad(), _native.translated_errors():
            for name, host in self._host.find(self._variables).items():
                self._executable.write(self._variables[name], host)

    def download_weights(self, *, what_fits: bool = False) -> None:
        """Copy the parameters and buffers that the program changes into the host's tensors.

        Others are the host's: another executor may train them.

        Args:
            what_fits: Copy the weights that still have a place in the model; warn of the others.

        Raises:
            Error: They are not those that the model was compiled with; nothing is copied. Not with
                ``what_fits``.
        """
        _logger.info("Writing weights from IPU to host")
        updates = () if self._plan is None else self._plan.updates
        changed = [*(update.parameter for update in updates), *self._program.changed_buffers]
        with host_weights.without_sync(), torch.no_grad():
            for name, host in self._host.find(changed, what_fits=what_fits).items():
                host.copy_(self._executable.read(self._variables[name]))

    def check_weights(self, names: Iterable[str]) -> None:
        """Check that tensors of the model are those that it was compiled with.

        Args:
            names: Names of parameters or buffers that the program uses.

        Raises:
            Error: One of them is not.
        """
        with host_weights.without_sync():
            self._host.find(names)

    def initialise_optimizer(self) -> None:
        """Give states and hyper-parameters the values they have before the first update."""
        if self._plan is None:
            return
        for name, scalar in self._plan.scalars().items():
            if name in self._program.scalars:
                self._write_scalar(name, scalar.value)
        with host_weights.without_sync():
            weights = self._host.find(update.parameter for update in self._plan.updates)
            for update in self._plan.updates:
                for state in update.all_states:
                    value = state.initial_value(weights[update.parameter])
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
        taken = {name: value for name, value in tensors.items() if name in known}
        for name, value in taken.items():
            shape = self._program.graph.tensors[known[name]].shape
            if tuple(value.shape) != shape:
                raise Error(
                    f"The optimizer state '{name}' has the shape {tuple(value.shape)}, the "
                    f"device's has {shape}. Load a state of an optimizer of this model."
                )
        with _native.translated_errors():
            for name, value in taken.items():
                self._executable.write(known[name], value)

    def _write_scalar(self, name: str, value: float) -> None:
        self._executable.write(self._program.scalars[name], torch.tensor(value))
