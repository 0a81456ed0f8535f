"""Notices values of an optimizer that were changed, and that nobody has passed to setOptimizer."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch

from popsim_torch import logs, optim
from popsim_torch.optim.planning import OptimizerSettings

__all__ = ["ValueWatch"]


class ValueWatch:
    """Compares an optimizer's groups with the values that a model has, at each call.

    That is one comparison of short tuples for each group.

    Args:
        optimizer: The one in use.
        settings: Its values in use.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: OptimizerSettings) -> None:
        self._optimizer = optimizer
        self._groups = optimizer.param_groups
        names = [name for name in settings.defaults if not name.startswith("beta")]
        self._names = [*names, "betas"] if "beta1" in settings.defaults else names
        self._read = itemgetter(*self._names)
        self._known = [_in_use(group.values, self._names) for group in settings.groups]

    def check(self) -> None:
        """Warn once if a value differs from the one in use."""
        groups = self._optimizer.param_groups
        if groups is not self._groups:
            self._begin_anew(groups)
        for group, known in zip(groups, self._known, strict=False):
            if self._read(group) != known:
                self._compare(group, known)

    def _begin_anew(self, groups: list[dict[str, Any]]) -> None:
        """Go on with other groups; those that a model takes over by itself are in use."""
        self._groups = groups
        if isinstance(self._optimizer, optim.Optimizer):
            self._known = [self._read(group) for group in groups]

    def _compare(self, group: dict[str, Any], known: tuple[Any, ...]) -> None:
        for name, value, used in zip(self._names, self._read(group), known, strict=True):
            value = tuple(value) if isinstance(value, list) else value
            if value != used:
                logs.python.warning(
                    "The optimizer's %s is %s now, and the model goes on with %s: what is changed "
                    "in an optimizer counts from model.setOptimizer(optimizer) on. Call it after "
                    "scheduler.step(), or after a change of param_groups.",
                    *(name, _shown(value), _shown(used)),
                )
                self._known = []  # once is enough
                return


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _in_use(values: Any, names: list[str]) -> tuple[Any, ...]:
    return tuple(
        (values["beta1"].value, values["beta2"].value) if name == "betas" else values[name].value
        for name in names
    )
