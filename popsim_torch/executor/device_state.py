"""Copies weights, optimizer state and hyper-parameters between the host and the device."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from popsim_torch import _native, logs
from popsim_torch.errors import Error
from popsim_torch.executor import host_weights
from popsim_torch.executor.compile_lock import compile_lock
from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.executor.host_tensors import HostTensors
from popsim_torch.executor.host_writes import HostWrites
from popsim_torch.ir import names
from popsim_torch.optim.plan import OptimizerPlan, State
from popsim_torch.processes.exchange import GradientExchange, bytes_of


class DeviceState:
    """The variables that a compiled model keeps between runs; an optimizer's ``DeviceLink``.

    Args:
        module: The module with the parameters and buffers of the host.
        compiled: The program with the variables of the device.
        fixed: Whether the host's tensors stay the same objects, even if the module has other
            tensors under their names later.

    Attributes:
        writes: Notices changes of the host's tensors.
        exchange: The exchange with the other processes that train the program; None if there are
            none. It is told what the host writes.
    """

    def __init__(self, module: nn.Module, compiled: CompiledModel, *, fixed: bool = False) -> None:
        self.exchange: GradientExchange | None = None
        self._executable = compiled.executable
        self._program = compiled.program
        self._plan = compiled.plan
        self._changes_weights = self._plan is not None or bool(self._program.changed_state)
        # The number of runs at the last copy between host and device. A run counts from its
        # beginning: during a run, the device is ahead and refuses to copy.
        self._runs_in_common = 0
        # The number of times that the optimizer has written.
        self._num_writes = 0
        # The optimizer's states, and the version at which they were read.
        # The text of the hyper-parameters of a plan.
        self._text: tuple[OptimizerPlan, str] | None = None
        self._state_copy: tuple[tuple[int, int], dict[str, torch.Tensor]] | None = None
        self._variables = {**compiled.program.parameters, **compiled.program.buffers}
        tensors = compiled.program.graph.tensors
        shapes = {name: tensors[variable].host_shape for name, variable in self._variables.items()}
        self._host = HostTensors(module, shapes, fixed=fixed)
        self.writes = HostWrites(self._host.present)
        if not fixed:
            with host_weights.without_sync():
                self.writes.note(self._host.find(self._variables))

    @property
    def plan(self) -> OptimizerPlan | None:
        """The updates of the optimizer, with the present values on the device."""
        return self._plan

    @property
    def ahead(self) -> bool:
        """Whether a run has changed the weights since the last copy, or is changing them now."""
        return self._changes_weights and self._executable.num_runs != self._runs_in_common

    def upload_weights(self) -> None:
        """Copy parameters and floating-point buffers to the device.

        Raises:
            Error: They are not those that the model was compiled with. Nothing is copied.
        """
        logs.backend.info("Writing weights from host to IPU memory")
        num_runs = self._executable.num_runs
        quiet = host_weights.without_sync()
        with compile_lock, quiet, torch.no_grad(), _native.translated_errors():
            hosts = self._host.find(self._variables)
            self._executable.write_all({self._variables[n]: host for n, host in hosts.items()})
            self.writes.note(hosts)
            # Buffers that forward changes are those of this process alone.
            own = self._program.parameters.keys() - set(self._program.changed_state)
            self._note({n: host for n, host in hosts.items() if n in own})
        self._runs_in_common = num_runs

    def share_weights(self, exchange: GradientExchange, without: Collection[str]) -> None:
        """Give the host's tensors the values of process 0.

        Args:
            exchange: The exchange with the other processes.
            without: The names of tensors that each process keeps.

        Raises:
            Error: They are not those that the model was compiled with, or a process does not take
                part.
        """
        with host_weights.without_sync(), torch.no_grad():
            # In the order of the program, which is the same in all processes.
            names = [name for name in self._variables if name not in without]
            hosts = list(self._host.find(names).values())
            values = _shared(exchange, hosts, "Sharing the weights")
            for host, value in zip(hosts, values, strict=True):
                host.copy_(value)
            self.writes.note(dict(zip(names, hosts, strict=True)))

    def share_states(self, exchange: GradientExchange) -> None:
        """Give the states of the optimizer the values of process 0.

        Raises:
            Error: A process does not take part.
        """
        states = self._read(self._program.states)
        values = _shared(exchange, list(states.values()), "Sharing the optimizer's state")
        with _native.translated_errors():
            self._executable.write_all(
                dict(zip(self._program.states.values(), values, strict=True))
            )
        self._num_writes += 1

    def hyper_parameter_text(self) -> str:
        """Return the present values of the optimizer; equal if and only if all values are."""
        plan = self._plan
        if plan is None:
            return ""
        if self._text is None or self._text[0] is not plan:
            groups = [{n: h.value for n, h in values.items()} for values in plan.group_values]
            defaults = {n: h.value for n, h in plan.defaults.items()}
            scale = plan.loss_scaling.value
            self._text = plan, f"groups {groups}, defaults {defaults}, loss scaling {scale}"
        return self._text[1]

    def _note(self, values: Mapping[str, torch.Tensor]) -> None:
        """Tell the other processes, at the next exchange, what was written."""
        if self.exchange is not None:
            self.exchange.note(dict(sorted(values.items())))

    def upload_buffers(self, names: Iterable[str]) -> None:
        """Copy the named buffers to the device; ignore those that the program does not use.

        Args:
            names: Names of buffers; a tied buffer may have any of its names.

        Raises:
            Error: They are not those that the model was compiled with. Nothing is copied.
        """
        with host_weights.without_sync(), torch.no_grad(), _native.translated_errors():
            used = self._host.used_names(names) & self._program.buffers.keys()
            hosts = self._host.find(sorted(used))
            self._executable.write_all({self._variables[n]: host for n, host in hosts.items()})
            self.writes.note(hosts)

    def download_weights(self, *, what_fits: bool = False) -> None:
        """Copy the parameters and buffers that the program changes into the host's tensors.

        Other tensors are left alone, because another executor may train them.

        Args:
            what_fits: Copy only the weights that still fit a tensor of the model; warn about the
                others.

        Raises:
            Error: They are not those that the model was compiled with. Nothing is copied. With
                ``what_fits``, this is a warning instead.
        """
        logs.backend.info("Writing weights from IPU to host")
        updates = () if self._plan is None else self._plan.updates
        trained = [update.parameter for update in updates]
        changed = dict.fromkeys([*trained, *self._program.changed_state])
        num_runs = self._executable.num_runs
        with host_weights.without_sync(), torch.no_grad(), _native.translated_errors():
            hosts = self._host.find(changed, what_fits=what_fits)
            self._executable.read_into({self._variables[n]: host for n, host in hosts.items()})
            self.writes.note(hosts)
        self._runs_in_common = num_runs

    def check_weights(self, names: Iterable[str]) -> None:
        """Check that tensors of the model are those that it was compiled with.

        Args:
            names: Names of parameters or buffers that the program uses.

        Raises:
            Error: At least one is another tensor.
        """
        with host_weights.without_sync():
            self._host.find(names)

    def initialise_optimizer(self) -> None:
        """Set states and hyper-parameters to their values before the first update."""
        if self._plan is None:
            return
        _log_lines(self._plan.description)
        for name, scalar in self._plan.scalars().items():
            if name in self._program.scalars:
                self._write_scalar(name, scalar.value)
        if self._plan.loss_scale_rule is not None:
            factor = self._program.states[names.LOSS_SCALE_FACTOR]
            self._executable.write(factor, torch.tensor(1.0, device="cpu"))
        with host_weights.without_sync():
            weights = self._host.find(update.parameter for update in self._plan.updates)
            for update in self._plan.updates:
                for state in update.all_states:
                    value = state.initial_value(weights[update.parameter])
                    variable = self._program.states[state.name]
                    shape = self._program.graph.tensors[variable].host_shape
                    self._executable.write(variable, value.expand(shape))

    def read_update_states(self, parameter: str) -> dict[str, torch.Tensor]:
        """Return the states that updates keep for a parameter, by kind, without loss scaling."""
        kept = self.states_of(parameter)
        values = self._read({state.kind: self._program.states[state.name] for state in kept})
        return {state.kind: _wide(values[state.kind]) / state.scale for state in kept}

    def write_update_states(self, values: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Continue with the states of another program's updates.

        Args:
            values: The results of ``read_update_states`` of that program, by the parameter's name
                in this one. A kind that is missing starts from its initial value.

        Raises:
            Error: A state has another shape. Nothing is written.
        """
        tensors, taken = self._program.graph.tensors, {}
        for parameter, found in values.items():
            for state in self.states_of(parameter):
                variable = self._program.states[state.name]
                value = found.get(state.kind)
                if value is None:
                    value = self._initial_value(state, parameter, tensors[variable].host_shape)
                elif value.numel() != math.prod(tensors[variable].host_shape):
                    raise _misfit(state.name, value, tensors[variable].host_shape)
                taken[variable] = (value * state.scale).to(state.dtype)
        if taken:
            with _native.translated_errors():
                self._executable.write_all(taken)
            self._note({str(variable): value for variable, value in taken.items()})
            self._num_writes += 1

    def _initial_value(self, state: State, parameter: str, shape: Sequence[int]) -> torch.Tensor:
        if state.initial_from is None:
            return torch.full(tuple(shape), state.initial, device="cpu")
        with host_weights.without_sync():
            return state.initial_value(self._host.find([parameter])[parameter]).expand(shape)

    def states_of(self, parameter: str) -> tuple[State, ...]:
        """Return the states that updates keep for a parameter, without the accumulator."""
        updates = () if self._plan is None else self._plan.updates
        return next((one.kept for one in updates if one.parameter == parameter), ())

    def constants_of(self, parameter: str) -> tuple[tuple[Any, ...], ...]:
        """Return what an optimizer keeps for a parameter beside numbers and tensors, by path."""
        updates = () if self._plan is None else self._plan.updates
        return next((one.constants for one in updates if one.parameter == parameter), ())

    def replace_plan(self, plan: OptimizerPlan) -> None:
        """Continue with other values of the same structure.

        Raises:
            Error: The new plan would need another program.
        """
        assert self._plan is not None
        self._plan.check_replaceable(plan)
        states, scalars = self._program.states, self._program.scalars
        factors = {states[name]: ratio for name, ratio in self._plan.state_ratios(plan).items()}
        values = {
            scalars[scalar.name]: self._scalar(scalars[scalar.name], scalar.value)
            for scalar in self._plan.changed_scalars(plan)
        }
        if values:
            _log_lines(plan.description)
        with _native.translated_errors():
            self._executable.write_all(values, factors)
        self._num_writes += 1
        self._plan = plan

    # The methods of ``DeviceLink``.

    def version(self) -> tuple[int, int]:
        """Return a value that changes when a run or the optimizer may have changed the states."""
        return self._executable.num_runs, self._num_writes

    def read_state(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's saved states by name; read them again only after a run."""
        assert self._plan is not None
        version = self.version()
        if self._state_copy is None or self._state_copy[0] != version:
            names = self._plan.saved_states()
            if names:
                logs.backend.info("Writing optimiser state tensors from IPU to host")
            tensors = self._read({name: self._program.states[name] for name in names})
            self._state_copy = version, tensors
        return self._state_copy[1]

    def read_parameters(self) -> dict[str, torch.Tensor]:
        """Return the variable hyper-parameters by name, in their derived form."""
        assert self._plan is not None
        scalars = self._program.scalars
        names = [name for name in self._plan.variable_scalars() if name in scalars]
        return self._read({name: scalars[name] for name in names})

    def read_all_states(self) -> dict[str, torch.Tensor]:
        """Return all states of the optimizer by name, with the accumulators."""
        return self._read(self._program.states)

    def check_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Check that states and hyper-parameters have the same shapes as on the device.

        Raises:
            Error: A shape differs.
        """
        known = {**self._program.states, **self._program.scalars}
        for name, value in tensors.items():
            if name not in known:
                continue
            shape = self._program.graph.tensors[known[name]].host_shape
            if tuple(value.shape) != shape:
                raise _misfit(name, value, shape)

    def write_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write states and hyper-parameters to the device; ignore names unknown to the program."""
        assert self._plan is not None
        missing = [name for name in self._plan.saved_states() if name not in tensors]
        if missing:
            logs.python.warning(
                "The optimizer state has no value for %s; the device keeps its own.", missing
            )
        known = {**self._program.states, **self._program.scalars}
        taken = {name: value for name, value in tensors.items() if name in known}
        self.check_state(taken)
        self.log_optimizer_upload()
        with _native.translated_errors():
            self._executable.write_all({known[name]: value for name, value in taken.items()})
        self._note(taken)
        self._num_writes += 1

    def log_optimizer_upload(self) -> None:
        """Log that the optimizer's state goes to the device, if there is any."""
        if self._plan is not None and self._plan.saved_states():
            logs.backend.info("Writing optimiser state tensors from host to IPU memory")

    def _read(self, tensors: dict[str, int]) -> dict[str, torch.Tensor]:
        with _native.translated_errors():
            values = self._executable.read_all(list(tensors.values()))
        return dict(zip(tensors, values, strict=True))

    def _write_scalar(self, name: str, value: float) -> None:
        variable = self._program.scalars[name]
        self._executable.write(variable, self._scalar(variable, value))

    def _scalar(self, variable: int, value: float) -> torch.Tensor:
        """Return the tensor of a hyper-parameter's value."""
        dtype = self._program.graph.tensors[variable].dtype
        return torch.tensor(value, dtype=dtype, device="cpu")


def _wide(value: torch.Tensor) -> torch.Tensor:
    """Return a state in a dtype in which it can be divided by its scale."""
    return value if value.is_complex() or value.dtype == torch.float64 else value.float()


def _shared(
    exchange: GradientExchange, tensors: Sequence[torch.Tensor], what: str
) -> list[torch.Tensor]:
    """Return the tensors of process 0, which has tensors of the same types and shapes."""
    if not tensors:
        return []
    whole = torch.cat([bytes_of(tensor) for tensor in tensors])
    exchange.peers.broadcast(whole, what)
    parts = torch.split(whole, [tensor.numel() * tensor.element_size() for tensor in tensors])
    # A part of other numbers may begin anywhere.
    return [
        part.clone().view(tensor.dtype).reshape(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def _log_lines(lines: Iterable[str]) -> None:
    for line in lines:
        logs.python.debug("%s", line)


def _misfit(name: str, given: torch.Tensor, shape: Sequence[int]) -> Error:
    return Error(
        f"The optimizer state '{name}' has the shape {tuple(given.shape)}; on the device it has "
        f"the shape {tuple(shape)}. Load a state of an optimizer of this model."
    )
