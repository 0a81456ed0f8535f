"""Whether ``torch.distributions`` check their arguments.

Why: ``Distribution.set_default_validate_args`` sets the default, and nothing tells it.

Checked: 2.13.
"""

from __future__ import annotations

from torch.distributions import Distribution

__all__ = ["validates_arguments"]


def validates_arguments() -> bool:
    """Return what ``set_default_validate_args`` has set last."""
    return Distribution._validate_args
