"""Reads whether ``torch.distributions`` check their arguments.

Why: ``Distribution.set_default_validate_args`` sets the default, but there is no way to read it.

Checked: 2.13.
"""

from __future__ import annotations

from torch.distributions import Distribution

__all__ = ["validates_arguments"]


def validates_arguments() -> bool:
    """Return the last value of ``set_default_validate_args``."""
    return Distribution._validate_args
