"""What ``set_pipelining_options`` and its like have set on models, and how it gets into options.

The settings are an attribute of the model, so copies of it have them, and so does a model that it
is a part of. Package private: the public functions are those of ``pipelining``.
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
    """Settings, and who brings them.

    Attributes:
        owner: A model or a function, for messages.
        settings: Its settings.
    """

    owner: str
    settings: PipeliningOptions


def set_on_model(model: nn.Module, settings: PipeliningOptions) -> None:
    """Keep settings on a model, in place of earlier ones."""
    global _num_calls
    setattr(model, _ATTRIBUTE, settings)
    _num_calls += 1


def num_calls() -> int:
    """Return how often settings were put on any model so far."""
    return _num_calls


def settings_of(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, Owned]]:
    """Return the settings on modules and on their parts, each module once."""
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
    """Return what settings change on options: owner and change by the setter's name.

    Args:
        options: What they are added to.
        owned: The settings.
        training: Whether the program trains; else counts and reductions are left out.

    Raises:
        UsageValueError: Two of them, or they and the options, say something else.
    """
    fresh = Options()
    taken: dict[str, tuple[str, Change]] = {}
    for one in owned:
        for change in one.settings.changes(training):
            before = taken.setdefault(change.setter, (one.owner, change))
            if before[1].value != change.value:
                raise UsageValueError(
                    f"{before[0]} set {change.setter} to {shown(before[1].value)}, and {one.owner} "
                    f"to {shown(change.value)}. A program has one: say the same in both, or leave "
                    "one of the two out."
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
    """Add what was set on a model, or on a part of it, to the options that it runs with.

    Args:
        options: Changed in place.
        model: The model.
        training: Whether it is trained; else counts and reductions are left out.

    Raises:
        UsageValueError: The options say something else, or another part does.
    """
    owned = [one for _, one in settings_of([model])]
    for _, change in changes_of(options, owned, training=training).values():
        change.write(options)


class SettingsThen:
    """What a model had set when an executor took over its options.

    Args:
        model: The model.
        training: Whether the executor trains it; else counts and reductions do not matter.
    """

    def __init__(self, model: nn.Module, *, training: bool) -> None:
        self._model = model
        self._training = training
        self._num_calls = num_calls()
        self._then = self._now()

    def check_kept(self) -> None:
        """Check that the model has the same settings still; next to no work if nobody set any.

        Raises:
            UsageValueError: They were made, or changed, since.
        """
        if self._num_calls == num_calls():
            return
        now = self._now()
        if now != self._then:
            owner = next((one[0] for one in now if one not in self._then), "Pipelining options")
            wrapping = "trainingModel" if self._training else "inferenceModel"
            raise UsageValueError(
                f"{owner} were set after {wrapping}, which had taken its options by then. Call "
                f"set_pipelining_options and set_gradient_accumulation_options before {wrapping}."
            )
        self._num_calls = num_calls()

    def _now(self) -> list[tuple[str, list[tuple[str, Any]]]]:
        """Return what changes options: for each owner, setters and values."""
        found = []
        for _, one in settings_of([self._model]):
            changes = [(each.setter, each.value) for each in one.settings.changes(self._training)]
            if changes:
                found.append((one.owner, changes))
        return found
