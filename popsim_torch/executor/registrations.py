"""Counts what is registered in modules, so that a call need not look at all parts of a model."""

from __future__ import annotations

from typing import Any

from torch.nn.modules import module as modules

__all__ = ["num_registrations"]

_count: list[int] = []


def num_registrations() -> int:
    """Return how many parameters, buffers and modules were registered since the first call."""
    if not _count:
        _count.append(0)
        modules.register_module_parameter_registration_hook(_add_one)
        modules.register_module_buffer_registration_hook(_add_one)
        modules.register_module_module_registration_hook(_add_one)
    return _count[0]


def _add_one(*_: Any) -> None:
    _count[0] += 1
