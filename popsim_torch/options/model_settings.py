"""Stores settings on models for ``set_pipelining_options`` and similar functions.

They are added to the options of the model. The settings are an attribute of the model, so copies of
the model have them, and so does a model that contains it. Package private: the public functions are
in ``pipelining``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from torch import nn

from popsim_torch.errors import UsageValueError
from popsim_torch.options.options import Options
from popsim_torch.options.pipelining_settings import Change, PipeliningOptions, shown

__all__ = [
    "Owned",
    "SettingsThen",
    "add_settings",
    "changes_of",
    "num_calls",
    "set_on_model",
    "settings_of",
]

_ATTRIBUTE = "_popsim_pipelining"
_num_calls = 0


@dataclass(frozen=True)
class Owned:
    """Settings, and the object that has them.

    Attributes:
        owner: The description of a model or a function, for messages.
        settings: The settings of the model or function.
    """

    owner: str
    settings: PipeliningOptions


def set_on_model(model: nn.Module, settings: PipeliningOptions) -> None:
    """Store settings on a model, in place of earlier ones."""
    global _num_calls
    setattr(model, _ATTRIBUTE, settings)
    _num_calls += 1


def num_calls() -> int:
    """Return how often settings were stored on any model so far."""
    return _num_calls


def settings_of(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, Owned]]:
    """Return the settings of modules and of their submodules, once for each module."""
    found: dict[int, tuple[nn.Module, Owned]] = {}
    for module in modules:
        for part in module.modules():
            settings = vars(part).get(_ATTRIBUTE)
            if id(part) not in found and isinstance(settings, PipeliningOptions):
                own_class = getattr(type(part), "_popsim_class", type(part))
                owner = f"the pipelining options of the model {own_class.__name__}"
                found[id(part)] = part, Owned(owner, settings)
    return list(found.values())


def changes_of(
    options: Options, owned: Sequence[Owned], *, training: bool
) -> dict[str, tuple[str, Change]]:
    """Return the changes of options by some settings: owner and change, by the setter's name.

    Args:
        options: What they are added to.
        owned: The settings.
        training: Whether the program trains; otherwise counts and reductions are left out.

    Raises:
        UsageValueError: Two of the settings contradict each other, or a setting contradicts the
            options.
    """
    fresh = Options()
    taken: dict[str, tuple[str, Change]] = {}
    for one in owned:
        for change in one.settings.changes(training):
            before = taken.setdefault(change.setter, (one.owner, change))
            if before[1].value != change.value:
                raise UsageValueError(
                    f"{before[0]} set {change.setter} to {shown(before[1].value)}, and {one.owner} "
                    f"to {shown(change.value)}. A program has only one value: set the same value "
                    "in both, or leave one of the two out."
                )
            now = change.read(options)
            if now not in (change.value, change.read(fresh)):
                if isinstance(change.value, IntEnum):
                    now = type(change.value)(now)  # options store plain integers
                raise UsageValueError(
                    f"Options.{change.setter} has set {shown(now)}, and {one.owner} "
                    f"{shown(change.value)}. Leave one of the two out."
                )
    return taken


def add_settings(options: Options, model: nn.Module, *, training: bool) -> None:
    """Add the settings of a model and of its submodules to the options that it runs with.

    Args:
        options: Changed in place.
        model: The model.
        training: Whether the model is trained; otherwise counts and reductions are left out.

    Raises:
        UsageValueError: A setting contradicts the options or another setting.
    """
    owned = [one for _, one in settings_of([model])]
    for _, change in changes_of(options, owned, training=training).values():
        change.write(options)


class SettingsThen:
    """The settings of a model at the time when an executor copied its options.

    Args:
        model: The model.
        training: Whether the executor trains the model; otherwise counts and reductions are
            ignored.

    Attributes:
        model: The model.
        attributes: The attributes that it had.
    """

    def __init__(self, model: nn.Module, *, training: bool) -> None:
        self.model = model
        self.attributes = dict(vars(model))
        self._training = training
        self._num_calls = num_calls()
        self._then = self._now()

    def check_kept(self) -> None:
        """Check that the settings of the model have not changed; fast if no model has any.

        Raises:
            UsageValueError: Settings were added or changed since then.
        """
        if self._num_calls == num_calls():
            return
        now = self._now()
        if now != self._then:
            owner = next((one[0] for one in now if one not in self._then), "Pipelining options")
            wrapping = "trainingModel" if self._training else "inferenceModel"
            raise UsageValueError(
                f"{owner} were set after {wrapping}, which had already copied its options. Call "
                f"set_pipelining_options and set_gradient_accumulation_options before {wrapping}."
            )
        self._num_calls = num_calls()

    def _now(self) -> list[tuple[str, list[tuple[str, Any]]]]:
        """Return the changes of options: for each owner, setters and values."""
        found = []
        for _, one in settings_of([self.model]):
            changes = [(each.setter, each.value) for each in one.settings.changes(self._training)]
            if changes:
                found.append((one.owner, changes))
        return found
