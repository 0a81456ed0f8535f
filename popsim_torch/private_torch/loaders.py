"""The iterators of a ``torch.utils.data.DataLoader``, and the workers of a persistent one.

Why: the class of the iterator that ``iter(loader)`` returns has no public name, and a loop has to
tell it from other iterators. A loader with ``persistent_workers`` keeps its iterator and so its
processes. A copy of the loader, or one in another process, must not have them, and no method
removes them.

Checked: 2.13.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter as BaseDataLoaderIter

__all__ = ["BaseDataLoaderIter", "forget_workers", "state_without_workers"]


def forget_workers(loader: DataLoader[Any]) -> None:
    """Make a loader start new processes at its next iteration."""
    loader._iterator = None


def state_without_workers(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the state for a copy of a loader, or for another process, without its workers."""
    return {**vars(loader), "_iterator": None}
