"""What ``torch.optim`` keeps around the steps of optimizers: hooks, and a flag of schedulers.

Why: schedulers detect steps in the wrong order; they wrap ``optimizer.step``. The device updates
weights without that call, so each scheduler would warn that no update came before its own step.
Hooks of all optimizers change steps, and PyTorch only lets them be added.

Checked: 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

__all__ = ["hooks_of_all_steps", "note_step"]


def hooks_of_all_steps() -> list[Any]:
    """Return the hooks that each step of each optimizer calls."""
    return [*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()]


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell schedulers that an optimizer has updated its weights."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
