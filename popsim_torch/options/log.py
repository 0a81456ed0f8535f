"""The lines of the log about options, as the back end writes them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from popsim_torch import logs

__all__ = ["log_options"]


def log_options(settings: Mapping[str, Any]) -> None:
    """Write one DEBUG line for every setting, and for every entry of those that hold several.

    Args:
        settings: As ``Options.toDict`` returns them; functions among them are left out.
    """
    if not logs.backend.isEnabledFor(logs.DEBUG):
        return
    for key, value in settings.items():
        if isinstance(value, dict):
            for name, entry in value.items():
                logs.backend.debug("poptorch.Options set %s[%s] to %s", key, name, _shown(entry))
        elif isinstance(value, (list, set, frozenset, tuple)):
            for entry in value:
                logs.backend.debug("poptorch.Options added %s to %s", _shown(entry), key)
        elif not callable(value):
            logs.backend.debug("poptorch.Options set %s to value %s", key, _shown(value))


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value.value if isinstance(value, enum.Enum) else value)
