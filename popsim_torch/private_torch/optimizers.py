"""What schedulers of ``torch.optim`` look at, to warn of steps in the wrong order.

Why: they wrap ``optimizer.step`` of the optimizer that they are given. A device updates weights
without that call, so each scheduler would warn that no update came before its own step.

Checked: 2.13.
"""

from __future__ import annotations

import torch

__all__ = ["note_step"]


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell schedulers that an optimizer has updated its weights."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
