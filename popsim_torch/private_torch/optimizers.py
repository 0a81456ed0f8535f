"""The flag with which ``torch.optim`` schedulers detect steps in the wrong order.

Why: they wrap ``optimizer.step`` of their optimizer. The device updates weights without that call,
so each scheduler would warn that no update came before its own step.

Checked: 2.13.
"""

from __future__ import annotations

import torch

__all__ = ["note_step"]


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell schedulers that an optimizer has updated its weights."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
