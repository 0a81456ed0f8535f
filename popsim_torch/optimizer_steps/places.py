"""Finds out whether a step updates a parameter by its place among the others.

``enumerate(group["params"])``, ``len(...)``, or a list of rates with one entry for each parameter:
no trace of one parameter shows them. So the optimizer makes two steps on small host tensors, with
all parameters and with single ones; equal results show that the place does not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from popsim_torch.errors import Error
from popsim_torch.optim.nested import Path, leaves, mapped
from popsim_torch.optim.settings import OptimizerSettings
from popsim_torch.optim.step_source import StepSource
from popsim_torch.optimizer_steps.noting import NotingDict
from popsim_torch.optimizer_steps.source import Slot, rebuilt
from popsim_torch.optimizer_steps.watch import StepWatch, entries_of_groups
from popsim_torch.private_torch.modes import DisableTorchFunction

__all__ = ["Places", "find_places"]

_LARGEST = 4  # elements of a dimension
_MOST_ALONE = 64  # parameters that make a step alone
_NUM_STEPS = 2


@dataclass(frozen=True)
class Places:
    """What a step asks of the places of parameters.

    Attributes:
        count: Whether the update of a parameter depends on the others in the groups.
        names_count: Whether the step reads the names of parameters.
    """

    count: bool = False
    names_count: bool = False


def find_places(
    settings: OptimizerSettings,
    slots: Sequence[Slot],
    parameters: Sequence[torch.Tensor],
) -> Places:
    """Return what a step of the user's asks of the places of parameters.

    Args:
        settings: The values of the optimizer.
        slots: The parameters that a program trains.
        parameters: Their tensors on the host.

    Raises:
        Error: An update depends on parameters that the program does not train.
    """
    source = settings.source
    assert source is not None
    if not slots or source.kind.__module__.startswith("torch.optim."):
        return Places()
    every = []
    for index, group in enumerate(settings.groups):
        names = group.names or ("",) * len(group.parameters)
        for one, name in zip(group.parameters, names, strict=False):
            slot = Slot(index, tuple(one.shape), one.dtype)
            every.append(_Member(slot, one, trains=False, name=name))
    trained = {id(one): slot for slot, one in zip(slots, parameters, strict=True)}
    members = [one.with_slot(trained.get(id(one.parameter))) for one in every]
    members += [  # those in no group
        _Member(slot, one, trains=True)
        for slot, one in zip(slots, parameters, strict=True)
        if slot.group == len(settings.groups)
    ]
    return _Trials(source, members).places()


@dataclass(frozen=True)
class _Member:
    """A parameter in a group, whether the program trains it or not."""

    slot: Slot
    parameter: torch.Tensor
    trains: bool
    name: str = ""

    def with_slot(self, slot: Slot | None) -> _Member:
        if slot is None:
            return self
        return _Member(slot, self.parameter, trains=True, name=self.name)


class _Trials:
    def __init__(self, source: StepSource, members: Sequence[_Member]) -> None:
        self._source = source
        self._members = members
        self._reads_names = False
        self._changes_others = False
        self._largest: int | None = _LARGEST

    def places(self) -> Places:
        with torch.random.fork_rng(devices=[]), _SameDraws(), torch.enable_grad():
            # (the present numbers may hide a difference)
            count = any([self._count(*numbers) for numbers in ((1.0, 0.0), (0.75, 0.0625))])
        return Places(count or self._reads_names, self._reads_names)

    def _count(self, scale: float, shift: float) -> bool:
        """Return whether the update of a parameter depends on the others; true if in doubt."""
        every = range(len(self._members))
        trained = [i for i in every if self._members[i].trains]
        whole = self._steps(every, scale, shift)
        if whole is None and self._largest is not None:  # (it may need the real shapes)
            self._largest = None
            whole = self._steps(every, scale, shift)
        if self._changes_others:
            raise self._refused(
                "changes parameters without a gradient (their grad is None)",
                "skip those whose grad is None, or leave",
            )
        if whole is None:
            return True
        if len(trained) < len(self._members):
            those = self._steps(trained, scale, shift)
            if those is not None and not _agree(whole, those):
                raise self._refused(
                    "updates a parameter by its place among others or by their number (enumerate, "
                    "len, zip)",
                    "leave",
                )
        step = -(-len(trained) // _MOST_ALONE)
        alone = [trained[0], *trained[1::step], trained[-1]]
        found = [self._steps([i], scale, shift) for i in dict.fromkeys(alone)]
        return any(one is None or not _agree(whole, one) for one in found)

    def _steps(
        self, chosen: Iterable[int], scale: float, shift: float
    ) -> dict[int, torch.Tensor] | None:
        """Return the weights of some members after some steps; None if these fail.

        Args:
            chosen: The indices of the members.
            scale: The fractional numbers of groups are multiplied by it ...
            shift: ... and this is added.
        """
        try:
            return self._weights_of(list(chosen), scale, shift)
        except Exception:  # (the step may fail here, and say why while it is traced)
            return None

    def _weights_of(
        self, chosen: Sequence[int], scale: float, shift: float
    ) -> dict[int, torch.Tensor]:
        members = [self._members[i] for i in chosen]
        weights = [nn.Parameter(self._part(one.parameter), one.trains) for one in members]
        for weight, one in zip(weights, members, strict=True):
            vars(weight).update(one.slot.attributes)
        states: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        for weight, one in zip(weights, members, strict=True):
            known = self._source.states.get(id(one.parameter))
            if known:
                states[weight] = self._part_of_state(known, one.parameter)
        values: dict[tuple[int, Path], Any] = {
            path: one.clone() for path, one in self._source.group_tensors().items()
        }
        if (scale, shift) != (1.0, 0.0):
            values |= self._other_numbers(scale, shift)
        optimizer = rebuilt(
            self._source,
            [one.slot for one in members],
            weights,
            values,
            {(name,): one.clone() for name, one in self._source.tensors().items()},
            states,
            [one.name for one in members],
        )
        indices = tuple(dict.fromkeys(one.slot.group for one in members))
        watch = StepWatch(self._source, indices)
        for step in range(_NUM_STEPS):
            for position, weight, one in zip(chosen, weights, members, strict=True):
                if one.trains:
                    draws = torch.Generator().manual_seed(1000 * step + position)
                    gradient = torch.randn(weight.shape, generator=draws)
                    weight.grad = gradient.to(weight.dtype)
            watch.recall(optimizer)
            with watch.unchanged(optimizer, weights, entries_of_groups(indices, optimizer), {}):
                type(optimizer).step(optimizer)
        self._reads_names |= any(
            isinstance(group, NotingDict) and "param_names" in group.read
            for group in optimizer.param_groups
        )
        for weight, one in zip(weights, members, strict=True):
            if not one.trains and not torch.equal(weight.detach(), self._part(one.parameter)):
                self._changes_others = True
        pairs = zip(chosen, weights, strict=True)
        return {i: weight.detach() for i, weight in pairs if self._members[i].trains}

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a few elements of a tensor."""
        with torch.no_grad():
            return tensor[tuple(slice(0, self._largest) for _ in tensor.shape)].clone()

    def _part_of_state(self, state: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        def copied(_: Path, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return self._part(leaf) if leaf.shape == parameter.shape else leaf.clone()

        return dict(mapped(dict(state), copied))

    def _other_numbers(self, scale: float, shift: float) -> dict[tuple[int, Path], float]:
        """Return other fractional numbers of groups: the present ones may hide a difference."""
        return {
            (index, path): scale * leaf + shift
            for index, group in enumerate(self._source.groups)
            for path, leaf in leaves(dict(group))
            if type(leaf) is float
        }

    def _refused(self, what: str, advice: str) -> Error:
        kind = self._source.kind.__name__
        return Error(
            f"The step of {kind} {what}, and some of its parameters are not trained. On the "
            f"device, a step has the trained parameters only: {advice} the others out of {kind}."
        )


class _SameDraws(TorchFunctionMode):
    """Makes every call draw the same random numbers, because their order depends on the members."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with DisableTorchFunction():
            torch.default_generator.manual_seed(0)
            return func(*args, **(kwargs or {}))


def _agree(some: Mapping[int, torch.Tensor], others: Mapping[int, torch.Tensor]) -> bool:
    """Return whether the weights of the same members are the same, bit for bit."""
    return all(
        torch.allclose(some[i], others[i], rtol=0, atol=0, equal_nan=True)
        for i in some.keys() & others.keys()
    )
