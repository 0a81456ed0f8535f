"""The states of optimizers that several programs step.

Momenta and other states are on the device of the program that ran last. Before another program
runs, they move to it. So the loops of one or several functions continue each other, as in PyTorch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch.utils.weak import WeakIdKeyDictionary

from popsim_torch import optim
from popsim_torch.executor.device_state import DeviceState
from popsim_torch.executor.torch_states import connect, from_host, to_host
from popsim_torch.optim.plan import State

__all__ = ["OptimizerStates"]

ByKind: TypeAlias = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Left:
    """The states of a parameter that a program has left."""

    kept: Sequence[State]
    values: ByKind
    constants: Sequence[tuple[Any, ...]]


class OptimizerStates:
    """The states of the optimizers of one program.

    Args:
        state: The variables that the program keeps on its device.
        parameters: The parameters, by the names that they have in the program.
        optimizers: The optimizers that the program steps.

    Attributes:
        taken: The names of the states that the program has taken over.
    """

    def __init__(
        self,
        state: DeviceState,
        parameters: Mapping[str, torch.Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self._state = state
        self._optimizers = optimizers
        self._seen = -1
        self.taken: set[str] = set()
        self._version: object = None
        updates = () if state.plan is None else state.plan.updates
        trained = {id(parameters[one.parameter]): one.parameter for one in updates}
        # (strong references: the objects live as long as the program)
        self._trained = [
            [
                (parameter, trained[id(parameter)])
                for group in optimizer.param_groups
                for parameter in group["params"]
                if id(parameter) in trained
            ]
            for optimizer in optimizers
        ]

    def take(self) -> None:
        """Take over the states that others have changed since this program ran."""
        if self._seen == _changes.last:
            return
        for optimizer, trained in zip(self._optimizers, self._trained, strict=True):
            newest = _newest.setdefault(optimizer, WeakIdKeyDictionary())
            elsewhere = [one for one in trained if newest.get(one[0]) is not self]
            if not elsewhere:
                continue
            values: dict[str, ByKind] = {}
            for parameter, name in elsewhere:
                found = _values_of(optimizer, parameter, self._state.states_of(name))
                # (a program that has not run has the initial values)
                if found or (found is not None and self._seen != -1):
                    values[name] = found
            self._state.write_update_states(values)
            for name, found in values.items():
                self.taken |= {s.name for s in self._state.states_of(name) if s.kind in found}
            for parameter, _ in elsewhere:
                newest[parameter] = self
            if isinstance(optimizer, optim.Optimizer):
                optimizer._link(self._state)
            else:
                connect(optimizer, _give_to_host, _take_from_host)
            _changes.count()
            self._version = self._state.version()
        self._seen = _changes.last

    def adopt(self) -> None:
        """Go on with the states of the program, for an optimizer that replaces another one.

        States that the new optimizer has on the host, because it has loaded them, are taken over.
        """
        for optimizer, trained in zip(self._optimizers, self._trained, strict=True):
            newest = _newest.setdefault(optimizer, WeakIdKeyDictionary())
            for parameter, _ in trained:
                if parameter not in newest and not optimizer.state.get(parameter):
                    newest[parameter] = self
            connect(optimizer, _give_to_host, _take_from_host)
        _changes.count()

    def give_to_host(self) -> None:
        """Write the states to where the optimizers keep them on the host."""
        for optimizer in self._optimizers:
            if not isinstance(optimizer, optim.Optimizer):
                _give_to_host(optimizer)

    def _is_unchanged(self) -> bool:
        """Return whether no run has changed the states since they were taken over."""
        return self._version == self._state.version()

    def leave(self) -> None:
        """Leave the newest states to other programs, as this program ends."""
        for optimizer, trained in zip(self._optimizers, self._trained, strict=True):
            newest = _newest.get(optimizer, {})
            for parameter, _ in trained:
                if newest.get(parameter) is self:
                    newest[parameter] = _Left(
                        self.kept(parameter), self._read(parameter), self.constants(parameter)
                    )
            if isinstance(optimizer, optim.Optimizer) and optimizer._device is self._state:
                optimizer._unlink()

    def _read(self, parameter: torch.Tensor) -> ByKind:
        return self._state.read_update_states(self._name_of(parameter))

    def kept(self, parameter: torch.Tensor) -> Sequence[State]:
        """Return the states that the program has for a parameter."""
        return self._state.states_of(self._name_of(parameter))

    def constants(self, parameter: torch.Tensor) -> Sequence[tuple[Any, ...]]:
        """Return what the optimizer keeps for a parameter beside its states, by path."""
        return self._state.constants_of(self._name_of(parameter))

    def _name_of(self, parameter: torch.Tensor) -> str:
        every = (pair for trained in self._trained for pair in trained)
        return next(name for one, name in every if one is parameter)


def _values_of(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, kept: Sequence[State]
) -> ByKind | None:
    """Return the newest states of a parameter, from any side; None if there are none."""
    holder: OptimizerStates | _Left | None = _newest[optimizer].get(parameter)
    if isinstance(holder, OptimizerStates):
        return holder._read(parameter)
    if holder is not None:
        return holder.values
    return None if isinstance(optimizer, optim.Optimizer) else from_host(optimizer, parameter, kept)


def _give_to_host(optimizer: torch.optim.Optimizer) -> None:
    """Write the states of a torch optimizer to where PyTorch keeps them."""
    for parameter, holder in list(_newest.get(optimizer, {}).items()):
        if isinstance(holder, OptimizerStates):
            if not holder._is_unchanged() or optimizer.state.get(parameter):
                to_host(
                    *(optimizer, parameter, holder.kept(parameter), holder._read(parameter)),
                    holder.constants(parameter),
                )
        elif holder is not None:
            to_host(optimizer, parameter, holder.kept, holder.values, holder.constants)


def _take_from_host(optimizer: torch.optim.Optimizer) -> None:
    """Record that the host has changed its states: those of programs are out of date."""
    newest = _newest[optimizer]
    for parameter in list(newest):
        newest[parameter] = None
    _changes.count()


class _Changes:
    """Counts how often states have moved between programs."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.last = 0

    def count(self) -> None:
        self.last = next(self._numbers)


_changes = _Changes()
# By optimizer and parameter: the program that ran last; or copies of its states if it has ended;
# None if the host has the newest states.
_newest: WeakKeyDictionary[torch.optim.Optimizer, Any] = WeakKeyDictionary()
