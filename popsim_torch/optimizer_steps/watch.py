"""Refuses steps that change what the device does not keep, and puts that back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from popsim_torch.optim.nested import Path, leaves, number_kind, path_name
from popsim_torch.optim.step_source import StepSource
from popsim_torch.optimizer_steps.held import Held, HeldByCode, is_same, is_simple, refuse_change
from popsim_torch.optimizer_steps.lookups import missing_lookups
from popsim_torch.optimizer_steps.noting import NotingDict
from popsim_torch.optimizer_steps.python_functions import namespaces_of
from popsim_torch.optimizer_steps.source import changed_attribute, check_containers

__all__ = ["StepWatch", "entries_of_groups"]

# What a traced step has its own of.
_OF_STEPS = frozenset({"state", "param_groups"})


def entries_of_groups(
    indices: Iterable[int], optimizer: torch.optim.Optimizer
) -> dict[tuple[int, Path], Any]:
    """Return everything in the groups but parameters, by group and path.

    Args:
        indices: The numbers of the groups.
        optimizer: Has the groups.
    """
    return {
        (index, path): leaf
        for index, group in zip(indices, optimizer.param_groups, strict=True)
        for key, value in dict.items(group)
        if key != "params"
        for path, leaf in leaves(value, (key,))
    }


def _change_of_parameter(before: Mapping[str, Any], weight: torch.Tensor) -> str:
    """Return the name of an attribute that a step has put on a parameter, or has changed there."""
    for name, value in vars(weight).items():
        if name not in before or (is_simple(before[name]) and not is_same(before[name], value)):
            return f"the attribute '{name}' of a parameter"
    return ""


class StepWatch:
    """Watches runs of the step of an optimizer.

    Args:
        source: The optimizer.
        indices: The numbers of the groups.
    """

    def __init__(self, source: StepSource, indices: Sequence[int]) -> None:
        self._source = source
        self._indices = indices
        # What steps add to dicts that are attributes: a memory of results, if it stays.
        self._remembered: dict[str, dict[Any, Any]] = {}

    def recall(self, optimizer: torch.optim.Optimizer) -> None:
        """Give a copy of the optimizer what the last run has added to dicts."""
        for name, entries in self._remembered.items():
            dict.update(vars(optimizer)[name], entries)

    @contextlib.contextmanager
    def unchanged(
        self,
        optimizer: torch.optim.Optimizer,
        weights: Sequence[torch.Tensor],
        groups: Mapping[tuple[int, Path], Any],
        constants: Mapping[Any, Any],
    ) -> Iterator[None]:
        """Refuse a step that changes what the device does not keep, and put that back.

        Args:
            optimizer: The copy that makes the step.
            weights: Its parameters.
            groups: What its groups hold.
            constants: What states hold beside numbers and tensors, by slot, owner and path.
        """
        kind = self._source.kind
        before = dict(vars(optimizer))
        own = {f"self.{name}": v for name, v in before.items() if name not in _OF_STEPS}
        own |= {f"'{path_name(path)}' of a group": leaf for (_, path), leaf in groups.items()}
        own |= {f"'{path_name(key[2])}' in a state": v for key, v in constants.items()}
        held, by_code = Held(own), HeldByCode(kind, namespaces_of(kind))
        of_weights = [dict(vars(weight)) for weight in weights]
        with missing_lookups(kind) as missed:
            try:
                yield
                check_containers(self._source, optimizer)  # (it has the best advice)
                refuse_change(kind, by_code.change() or held.change())
                refuse_change(kind, changed_attribute(before, optimizer, missed))
                for weight, names in zip(weights, of_weights, strict=True):
                    refuse_change(kind, _change_of_parameter(names, weight))
                refuse_change(kind, self._change_of_groups(groups, optimizer))
                self._remember(before, optimizer)
            finally:
                held.restore()
                by_code.restore()

    def _change_of_groups(
        self, before: Mapping[tuple[int, Path], Any], optimizer: torch.optim.Optimizer
    ) -> str:
        """Return the name of an entry of a group that the device does not keep and has changed."""
        now = entries_of_groups(self._indices, optimizer)
        for key, old in before.items():
            new = now.get(key)
            tensors = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
            if key not in now or not (is_same(old, new) or number_kind(new) or tensors):
                return f"'{path_name(key[1])}' of group {key[0]}"
        groups = zip(self._indices, optimizer.param_groups, strict=True)
        read = {index: group.read for index, group in groups if isinstance(group, NotingDict)}
        for (index, path), value in now.items():
            added = (index, path) not in before and path[0] in read.get(index, ())
            tensor = isinstance(value, torch.Tensor) and len(path) == 1
            if added and not (number_kind(value) or tensor):
                return f"'{path_name(path)}' of group {index}"
        return ""

    def _remember(self, before: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
        """Keep for the next run what a step has added to dicts and looked for."""
        for name, value in vars(optimizer).items():
            old = self._source.attributes.get(name)
            if value is not before.get(name) or not isinstance(old, dict):
                continue
            if isinstance(value, NotingDict):
                self._remembered[name] = {
                    key: item
                    for key, item in dict.items(value)
                    if key not in old and key in value.read and is_simple(item)
                }
