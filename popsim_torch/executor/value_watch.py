"""Finds values of an optimizer that changed without a call of setOptimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import torch

from popsim_torch import logs, optim
from popsim_torch.executor.torch_states import moved_by_device
from popsim_torch.optim.nested import Path, leaves, mapped, path_name
from popsim_torch.optim.plan import HyperParameter
from popsim_torch.optim.planning import OptimizerSettings

__all__ = ["ValueWatch"]


class ValueWatch:
    """Compares an optimizer's groups with the values that a model has, at each call.

    Args:
        optimizer: The optimizer in use.
        settings: Its values in use.
    """

    __slots__ = ("_groups", "_known", "_names", "_optimizer", "_others", "_read", "_warned")

    def __init__(self, optimizer: torch.optim.Optimizer, settings: OptimizerSettings) -> None:
        names = [name for name in settings.defaults if not name.startswith("beta")]
        self._names = [*names, "betas"] if "beta1" in settings.defaults else names
        if settings.rule.traced:
            self._names = list(dict.fromkeys(name.partition(".")[0] for name in settings.defaults))
        self._read = _reader_of(self._names)
        self._optimizer = optimizer
        self._groups = optimizer.param_groups
        self._known, *self._others = [
            self._in_use(one.values, group)
            for one, group in zip(settings.groups, self._groups, strict=False)
        ]
        self._warned = False

    def check(self) -> None:
        """Warn once if a value differs from the one in use."""
        groups = self._optimizer.param_groups
        # The fast path of nearly all calls: do not add work here.
        if self._read(groups[0]) == self._known and len(groups) == 1 and groups is self._groups:
            return
        if not self._warned:
            self._look_closer(groups)

    def _in_use(self, values: Mapping[str, HyperParameter], group: dict[str, Any]) -> Any:
        """Return the values in use; the objects of the group if equal, as they compare fastest."""
        known = tuple(
            (values["beta1"].value, values["beta2"].value)
            if name == "betas" and "beta1" in values
            else _value_of(name, group[name], values)
            for name in self._names
        )
        now = self._read(group)
        if any(isinstance(value, torch.Tensor) for _, value in leaves(now)):
            return known  # a scheduler changes tensors in place
        return now if now == known else known

    def _look_closer(self, groups: list[dict[str, Any]]) -> None:
        if groups is not self._groups:
            self._groups = groups
            if isinstance(self._optimizer, optim.Optimizer):
                # The optimizer has loaded a state; the device takes it over without setOptimizer.
                self._known, *self._others = map(self._read, groups)
        if len(groups) != 1 + len(self._others):
            self._warned = True
            logs.python.warning(
                "The optimizer has %d groups now, but the model still uses the %d that it had: a "
                "change of an optimizer takes effect with model.setOptimizer(optimizer). Call it "
                "after add_param_group.",
                *(len(groups), 1 + len(self._others)),
            )
            return
        for group, known in zip(groups, (self._known, *self._others), strict=False):
            if not self._warned and self._read(group) != known:
                self._warn_of_difference(group, known)

    def _warn_of_difference(self, group: dict[str, Any], known: tuple[Any, ...]) -> None:
        for name, value, used in zip(self._names, self._read(group), known, strict=True):
            value = tuple(value) if isinstance(value, list) else value
            if value != used and name not in moved_by_device(self._optimizer):
                self._warned = True
                logs.python.warning(
                    "The optimizer's %s is now %s, but the model still uses %s: a change of an "
                    "optimizer takes effect with model.setOptimizer(optimizer). Call it after "
                    "scheduler.step(), or after a change of param_groups.",
                    *(name, _shown(value), _shown(used)),
                )
                return


def _reader_of(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return itemgetter(*names)
    return lambda group: tuple(group[name] for name in names)


def _value_of(name: str, now: Any, values: Mapping[str, HyperParameter]) -> Any:
    """Return the value in use of an entry of a group: a number, or a tuple with numbers."""

    def in_use(path: Path, leaf: Any) -> Any:
        known = values.get(path_name(path))
        return leaf if known is None else known.value

    return mapped(now, in_use, (name,))


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return f"{float(value):g}" if isinstance(value, float | torch.Tensor) else str(value)
